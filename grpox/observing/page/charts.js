// Curves: related metrics share a chart; hovering, zoom, smoothing and the log axis go for all charts at once.

/** Title, note, and legend -> metric; or a pattern of metrics, whose star gives the legend or the title. */
const CHARTS = [
  ["Reward", "weighted sum, mean over the batch", { reward: "reward", "before groups are replaced": "dynamic_sampling/first_reward" }],
  ["Accuracy", "on held-out prompts", { accuracy: "accuracy" }],
  ["Pass@k", "chance that one of k completions is right", "pass_at_*"],
  ["Success", "share of episodes", { sampled: "episodes/success", "held out": "success" }],
  ["Info: *", "mean over the episodes that report it", "info/*"],
  ["Reward: *", "mean over the batch", "rewards/*/mean"],
  ["Groups without signal", "share with equal rewards", { share: "frac_reward_zero_std", replaced: "dynamic_sampling/replaced" }],
  ["Loss", "of the step", { loss: "loss" }],
  ["KL to the reference", "estimator of train.kl, nats per token", { kl: "kl" }],
  ["KL to pi_old", "k3 estimate, nats per token", { kl: "kl_old" }],
  ["Entropy", "nats per token", { entropy: "entropy" }],
  ["Completions left out", "share that is off-policy", { share: "off_policy_masked" }],
  ["Completion length", "tokens", { mean: "completions/mean_length", shortest: "completions/min_length", longest: "completions/max_length" }],
  ["Turns", "of the model in an episode", { mean: "turns/mean", fewest: "turns/min", most: "turns/max" }],
  ["Calls of tools", "in the batch", "tools/*/calls"],
  ["Failed calls of tools", "in the batch", "tools/*/failures"],
  ["Ends of episodes", "share by reason", "episodes/ended_by/*"],
  ["Completions cut off", "share at the longest length", { share: "completions/clipped_ratio" }],
  ["Gradient norm", "before clipping", { norm: "grad_norm" }],
  ["Learning rate", "of the step", { rate: "learning_rate" }],
  ["Tokens clipped", "share of tokens", "clip_ratio/*_mean"],
  ["Generator against trainer", "difference of log-probabilities", { mean: "mismatch/difference_mean", largest: "mismatch/difference_max" }],
  ["Speed", "tokens per second", { generated: "tokens_per_second/generated", trained: "tokens_per_second/trained" }],
];
const EVALUATION = "evaluation/";
const FIRST = ["reward", "accuracy", "success"]; // shown even where they are flat
const HEIGHT = 190;
const MARKED_POINTS = 40; // largest number of points for which a curve has a dot at each
const MOST_MARKS = 20; // largest number of evaluations marked by lines; with more, none is
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

const curves = { step: null, zoom: null, smoothing: 0, isLog: false, text: "", drawn: [] };

/** Charts of the metrics in `names`: those of CHARTS, then one for each metric that these leave. */
function chartsOf(names) {
  const base = [...new Set(names.map((name) => name.replace(EVALUATION, "")))];
  const known = new Set(base);
  const covered = new Set(base.filter((name) => name.startsWith("time/")));
  const main = [];
  const add = (title, note, metrics) => {
    metrics.forEach(([, name]) => covered.add(name));
    main.push({ title, note, metrics });
  };
  for (const [title, note, wanted] of CHARTS) {
    if (typeof wanted === "string") {
      const [prefix, suffix] = wanted.split("*");
      const family = base.filter((name) => name.startsWith(prefix) && name.endsWith(suffix) && name.length > prefix.length + suffix.length)
        .map((name) => [name.slice(prefix.length, name.length - suffix.length), name]);
      if (title.includes("*")) family.forEach(([label, name]) => add(title.replace("*", () => label), note, [["mean", name]]));
      else if (family.length) add(title, note, family);
    } else {
      const metrics = Object.entries(wanted).filter(([, name]) => known.has(name));
      if (metrics.length) add(title, note, metrics);
    }
  }
  const others = base.filter((name) => !covered.has(name)).map((name) => ({ title: name, note: "", metrics: [[name, name]] }));
  return { main, others };
}

/** The curves that a chart shows: of each run each metric, and the same measure of its evaluations. */
function linesOf(chart) {
  const shown = shownRuns();
  const lines = [];
  for (const run of shown) {
    const series = run.detail || run.series;
    const notFinite = (name) => (run.names.find((entry) => entry.name === name) || {}).not_finite || 0;
    chart.metrics.forEach(([label, metric], place) => {
      const own = [shown.length > 1 ? run.name : null, chart.metrics.length > 1 ? label : null];
      const paint = shown.length > 1 ? { colour: run.place, dash: DASHES[place % DASHES.length] } : { colour: place, dash: [] };
      const step = series[metric];
      const evaluation = series[EVALUATION + metric];
      const legend = own.filter((part) => part !== null).join(" · ");
      if (step) lines.push({ ...paint, points: step, missing: notFinite(metric), isEvaluation: false, legend });
      if (evaluation) lines.push({ ...paint, points: evaluation, missing: notFinite(EVALUATION + metric), isEvaluation: true, isAlone: !step, legend: step ? (legend ? "" : "evaluation") : legend });
    });
  }
  return lines;
}

/** Exponential mean over the steps, without the bias of its beginning; gaps stay gaps. */
function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

class CurveChart {
  constructor(chart) {
    this.chart = chart;
    this.plot = make("div", { class: "plot", tabindex: 0, role: "img", "aria-label": chart.title, onkeydown: (event) => this.key(event) });
    this.step = make("span", { class: "remark step" });
    this.note = make("span", { class: "remark" });
    this.legend = make("div", { class: "legend" });
    this.card = make("figure", {}, make("figcaption", {},
      make("div", { class: "title" }, make("b", {}, visible(chart.title)), this.step), this.note, this.legend), this.plot);
    this.built = "";
  }

  /** Draw what the runs hold now; the card must be on the page. */
  update() {
    const lines = linesOf(this.chart);
    const missing = lines.reduce((sum, line) => sum + line.missing, 0);
    this.note.textContent = visible(this.chart.note) + (missing ? `${this.chart.note ? "; " : ""}${missing} not finite, left out` : "");
    const drawable = (values) => (curves.isLog ? values.map((value) => (value > 0 ? value : value === undefined ? undefined : null)) : values);
    const tables = [];
    const series = [{}];
    this.lines = [];
    for (const line of lines) {
      const [steps, values] = line.points;
      const stroke = colour(line.colour);
      const isDotted = !line.isEvaluation && steps.length <= MARKED_POINTS;
      const dots = { show: line.isEvaluation || isDotted, size: line.isEvaluation ? 8 : 4, width: 1.5, stroke, fill: line.isEvaluation ? style("--card") : stroke };
      const width = line.isEvaluation && !line.isAlone ? 0 : 1.6;
      const hasTwin = curves.smoothing > 0 && !line.isEvaluation;
      if (hasTwin) {
        tables.push([steps, drawable(values)]);
        series.push({ stroke: `${stroke}55`, width: 1, points: { show: false } });
      }
      this.lines.push({ ...line, place: series.length, raw: hasTwin ? series.length - 1 : series.length, stroke });
      tables.push([steps, drawable(hasTwin ? smoothed(values, curves.smoothing) : values)]);
      series.push({ stroke, width, dash: line.dash, points: dots });
    }
    const data = tables.length ? uPlot.join(tables) : [[]];
    const built = JSON.stringify([series, curves.isLog]);
    if (this.uplot && built === this.built) {
      this.uplot.setData(data, true);
    } else {
      if (this.uplot) this.uplot.destroy();
      this.built = built;
      this.uplot = new uPlot(this.options(series), data, this.plot);
    }
    this.tell(curves.step);
  }

  options(series) {
    return {
      width: this.plot.clientWidth || 320, height: HEIGHT, series, legend: { show: false }, padding: [8, 12, 0, 0],
      scales: {
        x: { time: false, range: (_, low, high) => curves.zoom || (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: curves.isLog ? 3 : 1, range: (_, low, high) => rangeOf(low, high) },
      },
      axes: axesOf(curves.isLog),
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 },
        bind: { dblclick: () => () => setZoom(null) },
      },
      hooks: {
        setSelect: [(plot) => this.zoom(plot)],
        setCursor: [(plot) => this.hover(plot)],
        drawAxes: [drawMarks],
      },
    };
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const [low, high] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    setZoom([Math.floor(low), Math.max(Math.ceil(high), Math.floor(low) + 1)]);
  }

  hover(plot) {
    const { idx, left } = plot.cursor;
    if (CurveChart.isFollowing) return;
    const step = left >= 0 && idx !== null && idx !== undefined ? plot.data[0][idx] : null;
    curves.step = step;
    CurveChart.isFollowing = true;
    for (const each of curves.drawn) each.follow(step, each === this);
    CurveChart.isFollowing = false;
  }

  /** Show the values at `step`, where another chart or this one is pointed at; null: the last ones. */
  follow(step, isSelf) {
    if (!this.uplot) return;
    if (!isSelf) this.uplot.setCursor({ left: step === null ? -10 : this.uplot.valToPos(step, "x"), top: -10 }, false);
    this.tell(step);
  }

  tell(step) {
    const steps = this.uplot.data[0];
    this.step.textContent = step === null ? "" : `step ${step}`;
    const items = this.lines.map((line) => {
      const values = this.uplot.data[line.raw];
      let place = steps.length - 1;
      if (step !== null) while (place > 0 && steps[place] > step) place -= 1;
      while (place > 0 && values[place] === undefined) place -= 1;
      const at = step !== null && steps[place] !== step && values[place] !== undefined ? ` at ${steps[place]}` : "";
      const mark = make("i", { class: line.isEvaluation ? "ring" : "" });
      mark.style[line.isEvaluation ? "borderColor" : "background"] = line.stroke;
      return { line, parts: [mark, visible(line.legend), line.legend ? " " : "", make("b", {}, number(values[place])), make("span", { class: "remark" }, at)] };
    });
    // The value of an evaluation stands beside that of the batch.
    fill(this.legend, items.filter(({ line }) => !line.isEvaluation || line.isAlone).map(({ line, parts }) => {
      const beside = items[items.findIndex((item) => item.line === line) + 1];
      const hasEvaluation = !line.isEvaluation && beside && beside.line.isEvaluation && !beside.line.isAlone;
      return make("span", {}, parts, hasEvaluation ? make("span", { class: "beside-value" }, beside.parts) : null);
    }));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return this.uplot.setCursor({ left: -10, top: -10 });
    if (!move) return undefined;
    event.preventDefault();
    const steps = this.uplot.data[0];
    const now = this.uplot.cursor.left >= 0 ? this.uplot.cursor.idx : steps.length;
    const place = Math.min(Math.max(now + move, 0), steps.length - 1);
    return this.uplot.setCursor({ left: this.uplot.valToPos(steps[place], "x"), top: 10 });
  }

  resize() {
    if (this.uplot && this.plot.clientWidth) this.uplot.setSize({ width: this.plot.clientWidth, height: HEIGHT });
  }
}

function rangeOf(low, high) {
  if (low === null || low === undefined) return curves.isLog ? [0.1, 1] : [0, 1];
  if (curves.isLog) return [low / 1.15, high * 1.15];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

function axesOf(isLog) {
  const plain = { stroke: style("--ink"), font: "11px system-ui, sans-serif", grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false } };
  const whole = (_, splits) => splits.map((value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : ""));
  const y = { ...plain, size: 52, space: 28, values: (_, splits) => splits.map((value) => (value === null ? "" : short(value))) };
  return [{ ...plain, size: 28, space: 50, values: whole }, isLog ? { ...y, filter: (_, splits) => splits, splits: (_, __, low, high) => logTicks(low, high) } : y];
}

/** Ticks of a log axis: 1, 2, 5 of each power of ten, fewer over many powers, and even ones within a single power. */
function logTicks(low, high) {
  const powers = Math.log10(high / low);
  if (powers < 0.7) {
    const raw = (high - low) / 4;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const by = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw);
    const ticks = [];
    for (let tick = Math.ceil(low / by) * by; tick <= high; tick += by) ticks.push(tick);
    return ticks;
  }
  const every = Math.max(1, Math.ceil(powers / 5));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
    for (const factor of powers < 2 ? [1, 2, 5] : [1])
      if (power % every === 0 && factor * 10 ** power >= low && factor * 10 ** power <= high) ticks.push(factor * 10 ** power);
  return ticks;
}

/** A number that fits beside an axis: 2.5k, 0.25, 1.5e−6. */
function short(value) {
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit * 10 || (size >= unit && letter !== "k")) return `${sign}${Number((size / unit).toPrecision(3))}${letter}`;
  if (size !== 0 && size < 1e-3) return sign + size.toExponential(1).replace(".0", "").replace("e-", "e−");
  return sign + String(Number(size.toPrecision(4)));
}

/** Steps of the evaluations of the runs that are shown; none if they would leave no room. */
function markedEvaluations() {
  const steps = new Set();
  for (const run of shownRuns())
    for (const [name, [each]] of Object.entries(run.series)) if (name.startsWith(EVALUATION)) each.forEach((step) => steps.add(step));
  return steps.size <= MOST_MARKS ? [...steps] : [];
}

/** Lines over all charts: dashed at evaluations, red at alarms. */
function drawMarks(plot) {
  const { ctx, bbox } = plot;
  const at = (step, stroke, dash) => {
    if (step < plot.scales.x.min || step > plot.scales.x.max) return;
    const left = plot.valToPos(step, "x", true);
    ctx.save();
    ctx.strokeStyle = stroke;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  };
  markedEvaluations().forEach((step) => at(step, style("--mark-line"), [2, 3]));
  for (const run of shownRuns()) for (const alarm of (run.info && run.info.alarms) || []) at(alarm.step, style("--bad"), []);
}

/** Show the steps of `zoom` in all charts; null: all. */
function setZoom(zoom) {
  curves.zoom = zoom;
  byId("reset-zoom").hidden = zoom === null;
  byId("from-step").value = zoom ? zoom[0] : "";
  byId("to-step").value = zoom ? zoom[1] : "";
  curves.drawn.forEach((chart) => chart.update());
  loadDetail().then((hasNew) => hasNew && curves.drawn.forEach((chart) => chart.update()));
}

/** Bring the charts on the page in line with the metrics of the runs; charts that stay keep their place. */
function updateCurves() {
  const shown = shownRuns();
  const names = new Map();
  for (const run of shown)
    for (const entry of run.names) { // what is flat in each run may differ between them
      const other = names.get(entry.name) || entry;
      names.set(entry.name, { ...entry, is_flat: entry.is_flat && other.is_flat && entry.last === other.last });
    }
  const isFlat = (metric) => !FIRST.includes(metric) && [metric, EVALUATION + metric].every((name) => !names.has(name) || names.get(name).is_flat);
  const { main, others } = chartsOf([...names.keys()]);
  const hasText = (chart) => !curves.text || [chart.title, ...chart.metrics.map(([, name]) => name)].some((name) => name.toLowerCase().includes(curves.text));
  const moving = (charts) => charts.filter((chart) => hasText(chart) && !chart.metrics.every(([, name]) => isFlat(name)));
  const more = moving(others);
  place(byId("charts"), moving(main));
  byId("others").hidden = more.length === 0;
  byId("others-count").textContent = plural(more.length, "more metric");
  place(byId("other-charts"), byId("others").open ? more : []);
  const flat = [...names.values()].filter((entry) => entry.is_flat && !entry.name.startsWith("time/") && (!curves.text || entry.name.toLowerCase().includes(curves.text)));
  byId("flat").hidden = flat.length === 0;
  byId("flat-count").textContent = `${plural(flat.length, "flat metric")}`;
  fill(byId("flat-rows"), flat.map((entry) => make("tr", {}, make("td", {}, make("code", {}, visible(entry.name))), make("td", { class: "number" }, number(entry.last)))));
  const evaluated = [...names.keys()].some((name) => name.startsWith(EVALUATION));
  byId("curve-remark").textContent = "Over optimizer steps. " +
    (evaluated ? "A circle is the same measure on the evaluation's prompts, a dashed line an evaluation. " : "The run had no evaluation. ") +
    "Drag over a chart to zoom, double-click to see all steps again.";
  curves.drawn = curves.drawn.filter((chart) => chart.card.isConnected);
  curves.drawn.forEach((chart) => chart.update());
}

function place(room, charts) {
  const old = new Map(curves.drawn.filter((chart) => chart.card.parentNode === room).map((chart) => [JSON.stringify(chart.chart), chart]));
  const cards = charts.map((chart) => {
    const known = old.get(JSON.stringify(chart));
    if (known) return known;
    const drawn = new CurveChart(chart);
    curves.drawn.push(drawn);
    return drawn;
  });
  const wanted = cards.map((chart) => chart.card);
  if (wanted.length !== room.children.length || wanted.some((card, at) => room.children[at] !== card)) fill(room, wanted);
}

/** Draw all charts anew, as after a change of the colours or of the axis. */
function redrawCurves() {
  curves.drawn.forEach((chart) => { chart.built = ""; chart.update(); });
}

function listenToCurves() {
  const smoothing = byId("smoothing");
  smoothing.addEventListener("input", () => {
    curves.smoothing = Number(smoothing.value);
    byId("smoothing-value").value = smoothing.value;
    curves.drawn.forEach((chart) => chart.update());
  });
  byId("log").addEventListener("change", (event) => { curves.isLog = event.target.checked; redrawCurves(); });
  byId("metric-text").addEventListener("input", later(() => {
    curves.text = byId("metric-text").value.trim().toLowerCase();
    if (curves.text) byId("others").open = true;
    updateCurves();
  }, 150));
  byId("reset-zoom").addEventListener("click", () => setZoom(null));
  const typed = () => {
    const [low, high] = ["from-step", "to-step"].map((id) => (byId(id).value === "" ? null : Number(byId(id).value)));
    const last = Math.max(0, ...shownRuns().flatMap((run) => Object.values(run.series).map(([steps]) => steps[steps.length - 1])));
    if (low === null && high === null) setZoom(null);
    else if ((low ?? 0) < (high ?? last)) setZoom([low ?? 0, high ?? last]);
  };
  byId("from-step").addEventListener("change", typed);
  byId("to-step").addEventListener("change", typed);
  byId("curve-controls").addEventListener("submit", (event) => event.preventDefault());
  byId("others").addEventListener("toggle", updateCurves);
  new ResizeObserver(later(() => curves.drawn.forEach((chart) => chart.resize()), 60)).observe(byId("curves"));
}
