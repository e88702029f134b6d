// The tokens of a completion, coloured by one of their numbers.

/** Name -> the number of a token, and the colours of its lowest and highest value; a middle makes two colours. */
const MEASURES = {
  probability: { of: (token) => (token.logprob === null || token.logprob === undefined ? null : Math.exp(token.logprob)), low: 0, high: 1, colours: ["--bad", "--good"], middle: 0.5 },
  advantage: { of: (token) => token.advantage, colours: ["--bad", "--good"], middle: 0 },
  ratio: { of: (token) => token.ratio, colours: ["--c0", "--c1"], middle: 1 },
  entropy: { of: (token) => token.entropy, low: 0, colours: ["--card", "--c3"] },
  mask: { of: (token) => token.mask, low: 0, high: 1, colours: ["--card", "--c0"] },
};

/** How strongly each token is coloured, from -1 to 1; null without a number. */
function strengths(tokens, measure) {
  const values = tokens.map((token) => measure.of(token) ?? null);
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  const middle = measure.middle ?? measure.low ?? 0;
  const [low, high] = extent(known);
  const span = Math.max((measure.high ?? high) - middle, middle - (measure.low ?? low), 1e-9);
  return values.map((value) => (value === null ? null : Math.max(-1, Math.min(1, (value - middle) / span))));
}

/** Lowest and highest value; Math.min has no room for the tokens of a very long completion. */
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

function tokenView(tokens) {
  const has = Object.entries(MEASURES).filter(([, measure]) => tokens.some((token) => (measure.of(token) ?? null) !== null));
  if (!tokens.length || !has.length) return make("p", { class: "remark" }, "The run saved no numbers of these tokens.");
  const select = make("select", { "aria-label": "Colour of the tokens" }, has.map(([name]) => make("option", { value: name }, name)));
  const scale = make("span", { class: "remark" });
  const facts = make("p", { class: "facts", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
  const spans = tokens.map((token) => make("span", { class: `token${token.kind === "observation" ? " observed" : ""}${token.special ? " special" : ""}` }, visible(token.text || token.special || "").replace(/\n/g, "⏎\n")));
  const paint = () => {
    const measure = MEASURES[select.value];
    strengths(tokens, measure).forEach((strength, place) => {
      const name = measure.colours[strength < 0 ? 0 : 1];
      spans[place].style.background = strength === null ? "" : `color-mix(in srgb, var(${name}) ${Math.round(65 * Math.abs(strength))}%, transparent)`;
    });
    const values = tokens.map((token) => measure.of(token) ?? null).filter((value) => value !== null);
    scale.textContent = extent(values).map(number).join(" to ");
  };
  let chosen = -1;
  const tell = (place) => {
    if (chosen >= 0) spans[chosen].classList.remove("chosen");
    chosen = place;
    spans[place].classList.add("chosen");
    const token = tokens[place];
    const told = [["token", token.id], ["probability", MEASURES.probability.of(token)], ["log-probability", token.logprob], ["of the policy", token.policy_logprob],
      ["ratio", token.ratio], ["advantage", token.advantage], ["entropy", token.entropy], ["correction", token.correction], ["mask", token.mask], ["turn", token.turn]];
    fill(facts, make("code", {}, JSON.stringify(visible(token.text || token.special || ""))), token.kind === "observation" ? " observation" : "",
      told.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => make("span", {}, ` · ${name} `, make("b", {}, name === "token" ? String(value) : number(value)))));
  };
  const at = (event) => spans.indexOf(event.target);
  const text = make("div", {
    class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens", dir: "auto",
    onmouseover: (event) => at(event) >= 0 && tell(at(event)),
    onclick: (event) => at(event) >= 0 && tell(at(event)),
    onkeydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      tell(Math.max(0, Math.min(tokens.length - 1, chosen + move)));
    },
  }, blocksOf(tokens, spans));
  select.addEventListener("change", paint);
  paint();
  return make("div", { class: "token-view" }, make("p", { class: "controls" }, make("label", {}, "Colour ", select), scale), text, facts);
}

/** The tokens of one turn or observation stand in a block of their own. */
function blocksOf(tokens, spans) {
  const isOne = tokens.every((token) => token.kind === tokens[0].kind && token.turn === tokens[0].turn);
  if (isOne) return [make("pre", {}, spans)];
  const blocks = [];
  let before = null;
  tokens.forEach((token, place) => {
    if (!before || before.kind !== token.kind || before.turn !== token.turn)
      blocks.push({ label: token.kind === "observation" ? "observation" : `turn ${(token.turn ?? 0) + 1}`, spans: [], isObserved: token.kind === "observation" });
    blocks[blocks.length - 1].spans.push(spans[place]);
    before = token;
  });
  return blocks.map((block) => make("div", { class: block.isObserved ? "block observation" : "block" }, make("span", { class: "who" }, block.label), make("pre", {}, block.spans)));
}
