// The page as a whole: its runs, its parts, and the questions that it asks again every two seconds.

const EVERY = 2000;
const POINTS = 800;
const VIEWS = ["curves", "completions", "time", "run"];
const page = { runs: [], view: "curves", isEnded: false };

const shownRuns = () => page.runs.filter((run) => run.isShown);
const runNamed = (name) => shownRuns().find((run) => run.name === name);

function tellProblem(error) {
  const live = byId("live");
  live.className = "live gone";
  live.textContent = error instanceof Refused ? visible(error.message) : "server gone";
  if (!(error instanceof Refused) && !(error instanceof TypeError)) throw error;
}

/** Take what is new of a run's metrics to what the page has; a repeated step is the later one's. */
function merge(run, answer) {
  run.position = answer.position;
  run.generation = answer.generation;
  run.names = answer.names;
  for (const [name, [steps, values]] of Object.entries(answer.series)) {
    const old = run.series[name];
    if (!steps.length) continue;
    const isWhole = name.startsWith("system/"); // a measurement moves as steps end
    if (!old || isWhole || old[0][0] >= steps[0]) { run.series[name] = [steps, values]; continue; }
    let end = old[0].length;
    while (end > 0 && old[0][end - 1] >= steps[0]) end -= 1;
    run.series[name] = [[...old[0].slice(0, end), ...steps], [...old[1].slice(0, end), ...values]];
  }
}

async function loadRun(run) {
  const [info, answer] = await Promise.all([
    ask("run", { run: run.name }), ask("metrics", { run: run.name, since: run.position, generation: run.generation, points: POINTS })]);
  const isAnew = run.generation !== undefined && answer.generation !== run.generation;
  run.info = info;
  if (isAnew) run.series = {};
  merge(run, answer);
  const longest = Math.max(0, ...Object.values(run.series).map(([steps]) => steps.length));
  if (longest > 3 * POINTS) { // many small pieces: take the curves anew, thinned out
    run.series = {};
    merge(run, await ask("metrics", { run: run.name, points: POINTS }));
  }
}

/** Of a part of the steps, ask for the curves again where the page has not every step; true if it did. */
async function loadDetail() {
  const zoom = curves.zoom;
  let hasNew = false;
  for (const run of shownRuns()) {
    const isThinned = Object.values(run.series).some(([steps]) => steps.length >= POINTS / 2);
    if (FROZEN || !zoom || !isThinned) { hasNew = hasNew || Boolean(run.detail); run.detail = null; continue; }
    const { series } = await ask("metrics", { run: run.name, first: zoom[0], last: zoom[1], points: POINTS });
    if (zoom !== curves.zoom) return false;
    run.detail = series;
    hasNew = true;
  }
  return hasNew;
}

async function updateView() {
  if (page.view === "curves") updateCurves();
  else if (page.view === "completions") await (found.isLoaded ? lookForNewer() : search());
  else if (page.view === "time") await updateTime();
  else await updateAbout();
}

async function refresh() {
  try {
    const before = JSON.stringify(shownRuns().map((run) => [run.info && run.info.version, run.position]));
    await Promise.all(shownRuns().map(loadRun));
    const now = JSON.stringify(shownRuns().map((run) => [run.info.version, run.position]));
    updateTop();
    if (before !== now) {
      if (curves.zoom) await loadDetail();
      await updateView();
    } else if (page.view === "completions" && found.known && found.known.is_indexed === false) await lookForNewer();
    page.isEnded = shownRuns().every((run) => run.info.status !== "running");
    const live = byId("live");
    live.className = `live ${FROZEN ? "" : page.isEnded ? "ended" : "on"}`;
    live.textContent = FROZEN ? "" : page.isEnded ? "ended" : "live";
  } catch (error) {
    tellProblem(error);
  } finally {
    if (!FROZEN) setTimeout(refresh, EVERY);
  }
}

function show(view) {
  page.view = viewOf(`#${view}`);
  for (const name of VIEWS) byId(name).hidden = name !== page.view;
  for (const link of byId("views").querySelectorAll("a"))
    if (link.hash === `#${page.view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  return updateView().catch(tellProblem);
}

const viewOf = (hash) => (VIEWS.includes(hash.slice(1)) ? hash.slice(1) : VIEWS[0]);

/** Show the part whose link is clicked, without a jump where the top of the page is seen. */
function choosePart(event) {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  history.pushState(null, "", link.hash);
  const end = byId("top").offsetTop + byId("top").offsetHeight;
  if (scrollY > end) scrollTo(0, end);
  show(viewOf(link.hash));
}

/** A box for each run that can be laid over the others. */
function fillRuns() {
  byId("runs").hidden = page.runs.length < 2;
  const boxes = page.runs.map((run) => {
    const box = make("input", { type: "checkbox", onchange: async (event) => {
      if (!event.target.checked && shownRuns().length === 1) { event.target.checked = true; return; }
      run.isShown = event.target.checked;
      try {
        if (run.isShown) await loadRun(run);
        found.isLoaded = found.isLoaded && Boolean(runNamed(found.run));
        updateTop();
        await updateView();
      } catch (error) { tellProblem(error); }
    } });
    box.checked = run.isShown;
    return make("label", {}, box, swatch(run), visible(run.name));
  });
  fill(byId("runs"), make("legend", {}, "Runs"), boxes);
}

async function start() {
  listenToCurves();
  listenToCompletions();
  listenToTime();
  addEventListener("hashchange", () => show(location.hash.slice(1)));
  byId("views").addEventListener("click", choosePart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    redrawCurves();
    clock.built = "";
    updateView().catch(tellProblem);
  });
  const runs = await ask("runs");
  page.runs = runs.map((run, place) => ({ name: run.name, place, isShown: run.shown, names: [], series: {}, position: 0, detail: null, info: null }));
  if (page.runs.length && !shownRuns().length) page.runs[0].isShown = true;
  fillRuns();
  page.view = viewOf(location.hash);
  await refresh();
  await show(location.hash.slice(1));
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => { tellProblem(error); });
