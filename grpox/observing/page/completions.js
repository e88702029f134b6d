// Completions: searched by text, reward and step; grouped by prompt; one prompt over the steps.

const PAGE = 25;
const found = { rows: [], total: 0, offset: 0, known: null, prompt: null, run: null, request: 0, isLoaded: false };

const numberIn = (id) => (byId(id).value === "" ? null : Number(byId(id).value));

function query() {
  return {
    run: found.run, text: byId("text").value, reward_min: numberIn("reward-min"), reward_max: numberIn("reward-max"),
    step_min: numberIn("step-min"), step_max: numberIn("step-max"), order: byId("order").value,
    prompt: found.prompt, group_by_prompt: byId("group").checked && !found.prompt,
  };
}

/** Ask for the first completions, or with `isMore` for the next ones. */
async function search(isMore = false) {
  const run = runNamed(found.run) || shownRuns()[0];
  found.run = run.name;
  chooser("completion-run", found.run, run);
  found.request += 1;
  const request = found.request;
  const asked = query();
  const answer = await ask("completions", { ...asked, offset: isMore ? found.offset : 0, limit: PAGE });
  if (request !== found.request) return; // a later search has been asked for
  found.isLoaded = true;
  found.known = answer;
  found.offset = (isMore ? found.offset : 0) + PAGE;
  if (!isMore) found.total = answer.total;
  // New completions may have moved those already shown behind the offset.
  const idOf = (row) => row.id ?? row.prompt_id;
  const shown = new Set(isMore ? found.rows.map(idOf) : []);
  const rows = answer.rows.filter((row) => !shown.has(idOf(row)));
  found.rows = isMore ? [...found.rows, ...rows] : rows;
  const cards = rows.map((row) => (asked.group_by_prompt ? promptCard(row) : completionCard(row, asked.text)));
  if (isMore) byId("rows").append(...cards);
  else fill(byId("rows"), cards);
  tellCount(answer, asked.group_by_prompt ? "prompt" : "completion");
  if (!isMore) byId("newer").hidden = true;
  byId("more").hidden = found.offset >= answer.total;
  tellLimits(answer);
  await showPrompt();
}

/** Say what a page without a server leaves out, or what the server could not read. */
function tellLimits(answer) {
  const room = byId("completions-remark");
  room.hidden = !answer.remark && !answer.message;
  keep(room, [answer.remark, answer.message, answer.batches], () => [
    answer.message ? make("p", { class: "remark" }, visible(answer.message)) : null,
    answer.remark ? make("details", {}, make("summary", { class: "remark" }, visible(answer.remark[0])), make("p", { class: "remark" }, visible(answer.remark[1])),
      make("div", { class: "wide" }, tableOf(["batch", "#completions shown", "#of", "#lowest reward", "#mean", "#highest"],
        answer.batches.map(([label, ...numbers]) => [label, ...numbers.map(number)])))) : null]);
}

function tellCount(answer, noun) {
  const still = answer.is_indexed === false ? "; still reading the files" : "";
  byId("count").textContent = answer.total ? `${plural(answer.total, noun)}, ${found.rows.length} shown${still}`
    : answer.none || (answer.is_indexed === false ? "Reading the files …" : "No completion fits, or none were saved (logging.save_completions_every).");
}

/** While the run goes on: say that there are more, and leave what is read in its place. */
async function lookForNewer() {
  if (!found.isLoaded || FROZEN) return;
  const answer = await ask("completions", { ...query(), offset: 0, limit: 1 });
  const isRead = found.known.is_indexed === false && answer.is_indexed !== false;
  if (found.rows.length === 0 && answer.total > 0 || isRead && found.offset <= PAGE) return search();
  if (isRead) {
    found.known = answer;
    tellCount({ ...answer, total: answer.total }, byId("group").checked && !found.prompt ? "prompt" : "completion");
  }
  const newer = answer.total - found.total;
  byId("newer").hidden = newer <= 0;
  byId("newer").textContent = `${newer.toLocaleString("en-US")} new: show`;
  return undefined;
}

/** Text with the parts that a search has found marked. */
function marked(text, wanted) {
  const shown = visible(text);
  const low = wanted ? visible(wanted).toLowerCase() : "";
  if (!low) return [shown];
  const parts = [];
  let from = 0;
  const lowered = shown.toLowerCase();
  for (let at = lowered.indexOf(low); at >= 0 && lowered.length === shown.length; at = lowered.indexOf(low, from)) {
    parts.push(shown.slice(from, at), make("mark", {}, shown.slice(at, at + low.length)));
    from = at + low.length;
  }
  return [...parts, shown.slice(from)];
}

function completionCard(row, wanted) {
  const sign = row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "";
  const facts = [`step ${row.step}`, row.tokens === null || row.tokens === undefined ? null : plural(row.tokens, "token"),
    row.turns ? plural(row.turns, "turn") : null, row.finish_reason === "length" ? "cut off" : row.turns ? `ended by ${row.finish_reason}` : null];
  const rewards = Object.entries(row.rewards || {});
  const head = make("p", { class: "score" },
    make("b", { class: "reward" }, `reward ${number(row.reward)}`),
    make("span", { class: sign }, `advantage ${number(row.advantage)}`),
    rewards.map(([label, value]) => make("span", { class: "chip" }, `${visible(label)} `, make("b", {}, number(value)))),
    row.extreme ? make("span", { class: `tag ${row.extreme}` }, row.extreme) : null,
    make("span", { class: "remark" }, visible(facts.filter((fact) => fact).join(" · "))));
  const said = row.messages && row.messages.length > 1
    ? row.messages.map(([who, text]) => make("div", { class: who.startsWith("assistant") ? "message assistant" : "message" },
      make("span", { class: "who" }, visible(who)), make("pre", { class: who.startsWith("assistant") ? "completion" : "observation", dir: "auto" }, marked(text, wanted))))
    : [make("pre", { class: "completion", dir: "auto" }, marked(row.completion, wanted))];
  const beside = [...Object.entries(row.data || {}), ...Object.entries(row.extra || {})].filter(([, value]) => value !== null && value !== "");
  const actions = make("span", { class: "actions" },
    row.has_tokens ? make("button", { type: "button", class: "show-tokens", "aria-expanded": "false", onclick: (event) => toggleTokens(event.currentTarget, row) }, "tokens") : null,
    row.prompt_id && row.prompt_id !== found.prompt ? make("button", { type: "button", onclick: () => choosePrompt(row.prompt_id) }, "this prompt over the steps") : null);
  head.append(actions);
  return make("article", { "data-id": row.id }, head,
    make("div", { class: "texts" },
      make("div", {}, make("pre", { class: "prompt", dir: "auto" }, marked(row.prompt, wanted)), said),
      beside.length ? make("dl", { class: "beside" }, beside.map(([name, value]) => [make("dt", {}, visible(name)), make("dd", { dir: "auto" }, visible(typeof value === "object" ? JSON.stringify(value) : value))]).flat()) : null));
}

async function toggleTokens(button, row) {
  const card = button.closest("article");
  const open = card.querySelector(".token-view");
  button.setAttribute("aria-expanded", String(!open));
  if (open) return open.remove();
  try {
    const { tokens } = await ask("tokens", { run: found.run, id: row.id });
    const view = tokenView(tokens);
    view.classList.add("token-view");
    return card.append(view);
  } catch (error) {
    return tellProblem(error);
  }
}

function promptCard(row) {
  const steps = row.first_step === row.last_step ? `step ${row.first_step}` : `steps ${row.first_step} to ${row.last_step}`;
  const beside = Object.entries(row.data || {});
  return make("article", {},
    make("p", { class: "score" }, make("b", { class: "reward" }, `reward ${number(row.reward_first)} → ${number(row.reward_last)}`),
      make("span", { class: "remark" }, `${plural(row.count, "completion")} · ${steps}`),
      make("span", { class: "actions" }, make("button", { type: "button", onclick: () => choosePrompt(row.prompt_id) }, "its completions over the steps"))),
    make("div", { class: "texts" }, make("pre", { class: "prompt", dir: "auto" }, visible(row.prompt)),
      beside.length ? make("dl", { class: "beside" }, beside.map(([name, value]) => [make("dt", {}, visible(name)), make("dd", { dir: "auto" }, visible(value))]).flat()) : null));
}

function choosePrompt(prompt) {
  found.prompt = prompt;
  byId("order").value = "step";
  byId("group").checked = false;
  search().then(() => byId("completions").scrollIntoView()).catch(tellProblem);
}

/** The chosen prompt: a point for each of its completions, reward over step. */
async function showPrompt() {
  const room = byId("one-prompt");
  room.hidden = !found.prompt;
  if (!found.prompt) return;
  const { rows, total, history } = await ask("completions", { run: found.run, prompt: found.prompt, order: "step", limit: 1 });
  const points = history[0].map((step, place) => ({ step, reward: history[1][place] })).filter((row) => row.reward !== null);
  const drawn = make("div", { class: "plot", role: "img", "aria-label": "Reward of the prompt's completions over the steps" });
  fill(room, make("div", { class: "card" },
    make("p", { class: "score" }, make("b", {}, `One prompt over the steps: ${plural(total, "completion")}`),
      make("button", { type: "button", onclick: () => { found.prompt = null; search().catch(tellProblem); } }, "all prompts")),
    make("pre", { class: "prompt", dir: "auto" }, visible(rows.length ? rows[0].prompt : "")), drawn));
  if (!points.length) return;
  const steps = points.map((row) => row.step);
  const ofStep = new Map();
  for (const { step, reward } of points) {
    const [sum, count] = ofStep.get(step) || [0, 0];
    ofStep.set(step, [sum + reward, count + 1]);
  }
  const means = steps.map((step) => ofStep.get(step)[0] / ofStep.get(step)[1]);
  new uPlot({
    width: drawn.clientWidth || 320, height: 150, legend: { show: false }, padding: [8, 12, 0, 0], axes: axesOf(false),
    scales: { x: { time: false, range: (_, low, high) => [low - 0.5, high + 0.5] }, y: { range: (_, low, high) => (low === null ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low - (high - low) * 0.1, high + (high - low) * 0.1]) } },
    series: [{}, { stroke: colour(0), width: 0, points: { show: true, size: 7, stroke: colour(0), fill: `${colour(0)}66` } }, { stroke: colour(1), width: 1.5, points: { show: false } }],
    cursor: { y: false, drag: { x: false, y: false } },
  }, [steps, points.map((row) => row.reward), means], drawn);
}

function listenToCompletions() {
  const soon = later(() => search().catch(tellProblem), 200);
  byId("search").addEventListener("input", soon);
  byId("search").addEventListener("submit", (event) => event.preventDefault());
  byId("search").addEventListener("reset", () => { found.prompt = null; soon(); });
  byId("completion-run").addEventListener("change", (event) => { found.run = event.target.value; found.prompt = null; });
  byId("more").addEventListener("click", () => search(true).catch(tellProblem));
  byId("newer").addEventListener("click", () => search().catch(tellProblem));
}
