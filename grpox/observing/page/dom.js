// Elements and texts of the page. Texts of a run enter it as text nodes alone.

const byId = (id) => document.getElementById(id);

/** Make an element; `attributes` may hold class, listeners (onclick) and plain attributes; children are nodes or texts. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Escape control characters, and those that change the direction of text. */
function visible(text) {
  return String(text).replace(INVISIBLE, (character) => {
    const code = character.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Four digits; whole large numbers in full; a dash for no number. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (!Number.isFinite(size)) text = "inf";
  else if (size >= 1e4 && size < 1e15) text = Math.round(size).toLocaleString("en-US");
  else if (size !== 0 && (size < 1e-4 || size >= 1e15)) text = size.toExponential(2).replace(/\.?0+e/, "e");
  else text = String(Number(size.toPrecision(4)));
  return value < 0 ? `−${text}` : text;
}

function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;

/** Value of one of the page's colours and other CSS variables. */
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const COLOURS = 8;
const colour = (place) => style(`--c${place % COLOURS}`);

/** Call `act` once it has not been called for `milliseconds`. */
function later(act, milliseconds) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, milliseconds);
  };
}

/** A table of texts; `headings` that begin with "#" are columns of numbers. */
function tableOf(headings, rows) {
  const isNumber = headings.map((heading) => heading.startsWith("#"));
  const head = make("tr", {}, headings.map((heading, place) =>
    make("th", { class: isNumber[place] && "number", scope: "col" }, heading.replace("#", ""))));
  const body = rows.map((row) => make("tr", {}, row.map((cell, place) =>
    make("td", { class: isNumber[place] && "number" }, cell instanceof Node ? cell : visible(cell)))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, body));
}
