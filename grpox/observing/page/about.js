// The top of the page, and what the run is made of.

function updateTop() {
  const run = shownRuns()[0];
  const info = run.info;
  if (!info) return;
  const several = shownRuns().length > 1;
  byId("name").textContent = visible(several ? shownRuns().map((each) => each.name).join(", ") : info.source || info.name);
  document.title = `${visible(several ? "comparison" : info.source || info.name)} – grpox`;
  const status = byId("status");
  status.textContent = several ? "" : info.status;
  status.className = `status ${info.status}`;
  const quote = (text) => make("code", {}, visible(text));
  const parts = [info.model ? [make("span", {}, "model "), quote(info.model)] : null, [make("span", {}, "folder "), quote(info.folder)],
    info.steps ? [`step ${info.step} of ${info.steps}`] : [`step ${info.step}`],
    info.seconds_left ? [`about ${duration(info.seconds_left)} left`] : null, FROZEN ? [`report made ${FROZEN.made}`] : null];
  const ofRuns = shownRuns().filter((each) => each.info).map((each) => [swatch(each), `${visible(each.name)}: ${each.info.status}, step ${each.info.step}`]);
  keep(byId("about"), [several, ofRuns.map(([, text]) => text), parts.map(String), info], () => several ? ofRuns.map((part) => make("span", {}, part)) : parts.filter((part) => part).map((part) => make("span", {}, part)));
  byId("progress").hidden = info.status !== "running" || !info.steps;
  byId("progress-bar").style.width = `${Math.min(100, (100 * info.step) / (info.steps || 1))}%`;
  byId("error").hidden = !info.error;
  byId("error").textContent = visible(info.error || "");
  const remarks = [info.stopped_early ? `Stopped early ${info.stopped_early}.` : "",
    info.status === "unfinished" ? (FROZEN ? "The run had no summary when this report was made: it was still going on, or it was killed." : "The run has no summary and no process: it was killed.") : "",
    FROZEN && info.status === "running" ? "The run was still going on when this report was made." : "",
    ...(info.problems || [])].filter((text) => text);
  byId("stopped").hidden = !remarks.length;
  byId("stopped").textContent = visible(remarks.join(" "));
  const alarms = shownRuns().flatMap((each) => ((each.info && each.info.alarms) || []).map((alarm) => [each, alarm]));
  keep(byId("alarms"), alarms.map(([each, alarm]) => [each.name, alarm]), () => alarms.map(([each, alarm]) =>
    make("p", { class: "alarm" }, make("b", {}, several ? `Alarm in ${visible(each.name)} ` : "Alarm "), visible(alarm.text))));
  const tiles = several ? tilesOfRuns() : info.tiles.map(([name, value, remark]) => [name, [[null, value]], remark]);
  keep(byId("tiles"), tiles.map(([name, values, remark]) => [name, values.map(([run, value]) => [run && run.name, value]), remark]), () => tiles.map(([name, values, remark]) =>
    make("div", {}, make("dt", {}, visible(name)), values.map(([run, value]) => make("dd", { class: run && "of-run" }, run && swatch(run), visible(value))),
      remark ? make("dd", { class: "remark" }, visible(remark)) : null)));
}

/** The tiles of several runs: name, and the value of each run that has one. */
function tilesOfRuns() {
  const tiles = new Map();
  for (const run of shownRuns())
    for (const [name, value] of (run.info && run.info.tiles) || []) tiles.set(name, [...(tiles.get(name) || []), [run, value]]);
  return [...tiles].map(([name, values]) => [name, values, ""]);
}

function swatch(run) {
  const mark = make("i", {});
  mark.style.background = `var(--c${run.place % COLOURS})`;
  return mark;
}

/** Fill an element only where its content is another one, so that what is selected or open stays. */
function keep(element, content, build) {
  const text = JSON.stringify(content);
  if (element.filledWith === text) return;
  element.filledWith = text;
  fill(element, build());
}

async function updateAbout() {
  const runs = shownRuns();
  const [run] = runs;
  if (!run.info) return;
  const { components, versions, git_commit: commit, config } = run.info;
  const code = (text) => make("code", {}, visible(text));
  keep(byId("components"), components, () => tableOf(["component", "name", "parameters"], components.map(([kind, name, parameters]) => [kind, code(name), parameters])));
  const rows = [...Object.entries(versions || {}), ...(commit ? [["git commit", commit]] : [])];
  keep(byId("versions"), rows, () => tableOf(["distribution", "version"], rows.map(([name, version]) => [name, code(version)])));
  keep(byId("config"), config || "", () => (config ? make("details", {}, make("summary", {}, "The resolved run file, with every default"), make("pre", {}, visible(config)))
    : make("p", { class: "remark" }, "The folder has no config.yaml.")));
  const names = [...new Set(runs.flatMap((each) => each.names.map((entry) => entry.name)))];
  byId("all-metrics-count").textContent = `All ${run.names.length} metrics${runs.length > 1 ? ` of ${visible(run.name)}` : ""}: first, last, lowest and highest value`;
  const told = new Map(run.names.map((entry) => [entry.name, entry]));
  const table = tableOf(["metric", "#first", "#last", "#lowest", "#highest"], run.names.map((entry) => [code(entry.name), ...["first", "last", "min", "max"].map((key) => number(told.get(entry.name)[key]))]));
  fill(byId("metric-table"), [...table.children]);
  await updateDifferences(runs, names);
}

/** Of several runs: the keys of their configs that differ, and their last values. */
async function updateDifferences(runs, names) {
  byId("differences").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const { keys } = await ask("compare", { run: runs.map((run) => run.name) });
  const swatches = ["key", ...runs.map((run) => run.name)];
  const lasts = names.map((name) => [name, runs.map((run) => (run.names.find((entry) => entry.name === name) || {}).last)]);
  const finals = lasts.filter(([name]) => /^(evaluation\/)?(reward|accuracy|success|loss|entropy|kl|completions\/mean_length|grad_norm|step_time|pass_at_.*|rewards\/.*\/mean)$/.test(name));
  keep(byId("differences"), [keys, finals, swatches], () => [
    make("h2", {}, "Differences"),
    keys.length ? make("div", { class: "wide" }, tableOf(swatches, keys.map(([key, values]) => [make("code", {}, visible(key)), ...values.map((value) => value ?? "–")])))
      : make("p", { class: "remark" }, "The configs are equal."),
    make("h2", {}, "Last values"),
    make("div", { class: "wide" }, tableOf(["metric", ...runs.map((run) => `#${run.name}`)], finals.map(([name, values]) => [make("code", {}, visible(name)), ...values.map(number)]))),
  ]);
}
