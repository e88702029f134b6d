// Where a step's time goes, and the machines that ran it.

const clock = { step: null, run: null, plot: null, built: "", answer: null };

async function updateTime() {
  const run = runNamed(clock.run) || shownRuns()[0];
  chooser("time-run", clock.run, run);
  fillRanks(run);
  const answer = await ask("phases", { run: run.name, step: clock.step });
  clock.answer = answer;
  byId("time-step").value = answer.step ?? "";
  const total = answer.phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const names = Object.keys(answer.history);
  byId("phases-title").textContent = !names.length ? "No step has ended yet"
    : answer.phases.length ? `Step ${answer.step}: ${number(total)} s` : `Step ${answer.step} is not ${FROZEN ? "in this report" : "recorded"}`;
  const longest = Math.max(...answer.phases.map(([, seconds]) => seconds), 1e-9);
  fill(byId("phases"), [...answer.phases].sort((a, b) => b[1] - a[1]).map(([name, seconds]) => {
    const bar = make("div", { class: "bar" });
    bar.style.width = `${(100 * seconds) / longest}%`;
    bar.style.background = colour(names.indexOf(name));
    return make("div", { class: "phase" }, make("span", {}, visible(name)), make("div", { class: "track" }, bar),
      make("span", { class: "number" }, `${number(seconds)} s`), make("span", { class: "number remark" }, total ? `${Math.round((100 * seconds) / total)} %` : ""));
  }));
  drawHistory(answer.history, names);
}

/** Areas on top of each other, drawn from the highest down, so that each covers what belongs to those below it. */
function drawHistory(history, names) {
  if (!names.length) return;
  const joined = uPlot.join(names.map((name) => history[name]));
  const sums = [];
  for (const [place] of names.entries()) {
    const below = place ? sums[place - 1] : null;
    sums.push(joined[place + 1].map((value, at) => (value ?? 0) + (below ? below[at] : 0)));
  }
  const data = [joined[0], ...[...sums].reverse()];
  const series = [{}, ...[...names.keys()].reverse().map((place) => ({ stroke: colour(place), fill: colour(place), width: 0, points: { show: joined[0].length < 2, size: 8 } }))];
  const built = JSON.stringify([names, series]);
  const room = byId("phase-history");
  if (clock.plot && clock.built === built) {
    clock.plot.setData(data, true);
  } else {
    if (clock.plot) clock.plot.destroy();
    clock.built = built;
    clock.plot = new uPlot({
      width: room.clientWidth || 320, height: 260, series, legend: { show: false }, padding: [8, 12, 0, 0], axes: axesOf(false),
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (_, low, high) => [0, (high || 1) * 1.05] } },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: { draw: [(plot) => clock.answer && drawChosen(plot, clock.answer.step)] },
    }, data, room);
    clock.plot.over.addEventListener("click", () => {
      const at = clock.plot.cursor.idx;
      if (at !== null && at !== undefined) chooseStep(clock.plot.data[0][at]);
    });
  }
}

function drawChosen(plot, step) {
  const left = plot.valToPos(step, "x", true);
  plot.ctx.save();
  plot.ctx.strokeStyle = style("--text");
  plot.ctx.lineWidth = devicePixelRatio;
  plot.ctx.strokeRect(left, plot.bbox.top, 0, plot.bbox.height);
  plot.ctx.restore();
}

function chooseStep(step) {
  clock.step = step;
  return updateTime().catch(tellProblem);
}

/** A choice among the runs shown, hidden where there is one. */
function chooser(id, chosen, now) {
  const shown = shownRuns();
  byId(`${id}-label`).hidden = shown.length < 2;
  const names = shown.map((run) => run.name);
  const select = byId(id);
  if (JSON.stringify([...select.options].map((option) => option.value)) !== JSON.stringify(names))
    fill(select, names.map((name) => make("option", { value: name }, visible(name))));
  select.value = now.name;
}

function fillRanks(run) {
  const ranks = (run.info && run.info.ranks) || [];
  if (!ranks.length) return fill(byId("ranks"), make("p", { class: "remark" }, "The run's record names no machine (logging.system_metrics_every)."));
  const flat = ranks.map((rank) => {
    const { values, ...facts } = rank;
    return { ...facts, ...(values || {}) };
  });
  const keys = [...new Set(flat.flatMap((rank) => Object.keys(rank)))];
  const text = (value) => (typeof value === "number" ? number(value) : value === null || value === undefined ? "–" : Array.isArray(value) ? value.join(", ") : String(value));
  const isNumber = (key) => flat.every((rank) => typeof (rank[key] ?? 0) === "number");
  return fill(byId("ranks"), tableOf(keys.map((key) => (isNumber(key) ? `#${words(key)}` : words(key))), flat.map((rank) => keys.map((key) => text(rank[key])))));
}

const words = (key) => visible(key).replace(/_/g, " ");

function listenToTime() {
  const step = byId("time-step");
  step.addEventListener("change", () => step.value !== "" && chooseStep(Number(step.value)));
  const go = (by) => {
    if (!clock.answer) return;
    const steps = [...new Set(Object.values(clock.answer.history).flatMap(([each]) => each))].sort((a, b) => a - b);
    const at = steps.indexOf(clock.answer.step) + by;
    if (at >= 0 && at < steps.length) chooseStep(steps[at]);
  };
  byId("time-earlier").addEventListener("click", () => go(-1));
  byId("time-later").addEventListener("click", () => go(1));
  byId("time-latest").addEventListener("click", () => chooseStep(null));
  byId("time-run").addEventListener("change", (event) => { clock.run = event.target.value; chooseStep(null); });
  byId("time-controls").addEventListener("submit", (event) => event.preventDefault());
  new ResizeObserver(later(() => clock.plot && byId("phase-history").clientWidth &&
    clock.plot.setSize({ width: byId("phase-history").clientWidth, height: 260 }), 60)).observe(byId("phase-history"));
}
