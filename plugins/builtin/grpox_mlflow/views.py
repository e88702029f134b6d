"""Output of `grpox runs`: JSON for programs, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.errors import ConfigError, Problem, nearest
from grpox.toolkit import duration, pluralize
from grpox_mlflow.followed import FollowedRun
from grpox_mlflow.naming import CHANGED, KEY_TAG
from grpox_mlflow.store import page_of, place_of
from grpox_mlflow.tracked import (
    EVALUATION,
    OF_RUN,
    Course,
    Runs,
    TrackedRun,
    changed_params,
    figures,
    main_metrics,
    moment,
    same,
    shown_path,
    sparkline,
    strict,
)

STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
NINE_COLUMNS = 140
"""Width of a terminal below which the list of runs stacks its columns."""
NARROW = 100
"""Width below which tables of metrics omit their lowest value."""
REPORT = "report.html"
_WIDE, _SLIM = 24, 12
"""Widths of a curve in characters."""
_FACTS = {
    "mlflow.source.name": "run file",
    "grpox.version": "grpox",
    "grpox.git.commit": "git commit",
    "grpox.lock": "plugin lock",
    "mlflow.user": "user",
    "grpox.checkpoint": "checkpoint",
    "grpox.error": "ended by",
    "grpox.stopped_early": "stopped early",
}
"""Label of each tag."""
_OTHER_TAGS = ("mlflow.", "grpox.", "version.", "plugin.", CHANGED)
"""Prefixes of tags that the user did not set."""

Row = Sequence[str | Text | None]
"""Cells of a table."""
View = tuple[object, RenderableType]
"""The same content twice: as JSON for programs, with times in UTC, and for the terminal."""


# -- list ------------------------------------------------------------------------------------------------


def list_runs(runs: Runs, experiment: str | None, status: str | None, last: int, console: Console) -> View:
    """Look up the newest runs; of MLflow's store with one more request for each run with evaluations.

    Raises:
        ConfigError: there is no such experiment or status.
    """
    if status is not None and status.upper() not in STYLES:
        near, allowed = nearest(status.upper(), STYLES), ", ".join(STYLES)
        raise ConfigError("no such status", "--status", given=status, allowed=allowed, nearest=near)
    objects, rows = [], []
    for run in runs.newest(last, experiment, status and status.upper()):
        # The accuracy if there is one, else the first reward.
        metric = next((name for name in main_metrics(run) if name.startswith(EVALUATION)), None)
        course = runs.course(run, metric) if metric else None
        reward = strict(run.last["reward"].value) if "reward" in run.last else None
        evaluation = None if course is None else {"metric": course.metric, **course.as_json()}
        objects.append({**run.as_json(), "reward": reward, "evaluation": evaluation})
        rows.append(({"run": run.short_id} if runs.has_ids else {}) | _cells(run, course))
    if not rows:
        return [], Text(f"no such run in {runs.place}", no_wrap=True, overflow="ignore")
    return objects, _list_table(rows, console.width < NINE_COLUMNS)


def _list_table(rows: list[dict[str, str]], narrow: bool) -> Table:
    """Build one line per run; a narrow terminal stacks all but the first column and the status in one."""
    if len({cells["experiment"] for cells in rows}) == 1:
        for cells in rows:
            del cells["experiment"]  # the same for all runs
    if narrow:
        first = next(iter(rows[0]))
        rows = [{first: cells.pop(first), "status": cells["status"], "": _stacked(cells)} for cells in rows]
    headings = [(name, name in ("run", "status", "started", "duration")) for name in rows[0]]
    return _table(
        headings, [[_status(text) if name == "status" else text for name, text in r.items()] for r in rows]
    )


def _cells(run: TrackedRun, course: Course | None) -> dict[str, str]:
    reward, evaluation = run.last.get("reward"), ""
    if course is not None:
        first = f"{figures(course.first)} -> " if len(course.points) > 1 else ""
        evaluation = f"{course.metric.removeprefix(EVALUATION)} {first}{figures(course.last)}"
    return {
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "started": moment(run.started),
        # For a run without an end, show how long ago it started: that is no duration if the run was killed.
        "duration": duration(run.seconds) if run.ended is not None else "",
        "steps": f"{run.steps}/{run.total_steps}" if run.total_steps else str(run.steps),
        "reward": figures(reward) if reward else "",
        "evaluation": evaluation,
        "folder": shown_path(run.folder) if run.folder else "",
    }


def _stacked(cells: Mapping[str, str]) -> str:
    first = (cells[name] for name in ("name", "experiment", "folder") if name in cells)
    reward = f"reward {cells['reward']}" if cells["reward"] else ""
    second = (cells["started"], cells["duration"], f"{cells['steps']} steps", reward, cells["evaluation"])
    return f"{'  '.join(first)}\n{'  '.join(filter(None, second))}"


# -- show ------------------------------------------------------------------------------------------------


def show_run(runs: Runs, run: TrackedRun, every_param: bool, console: Console) -> View:
    """Read the histories of the main metrics and the list of artifacts.

    Args:
        every_param: True: include parameters with their default value.
    """
    courses = {name: course for name in main_metrics(run) if (course := runs.course(run, name))}
    params = run.params if every_param else changed_params(run.params)
    resumed_with = {
        key.removeprefix(CHANGED): value for key, value in run.tags.items() if key.startswith(CHANGED)
    }
    artifacts: dict[str, int | None] | None = None
    listed = "cannot be listed from here"
    with suppress(Exception):  # artifacts may be in a different, unreachable place
        artifacts = runs.artifacts(run)
        files = {name: "" if n is None else f"/ ({pluralize(n, 'file')})" for name, n in artifacts.items()}
        listed = ", ".join(f"{name}{count}" for name, count in files.items()) or "none"
    parts = {
        "": _grid(_facts(run)),
        "parameters" if every_param else "parameters that are not the default": _grid(params),
        "resumed with": _grid(resumed_with) if resumed_with else None,
        "metrics": _metrics(courses, console) if courses else Text("none yet"),
        "artifacts": Text(listed),
    }
    identity = [Text(run.name, "bold"), *([Text(run.run_id)] if run.run_id else []), _status(run.status)]
    lines: list[RenderableType] = [Text("  ").join(identity)]
    for title, part in parts.items():
        if part is not None:
            lines += [Text(title, "bold")] if title else []
            lines.append(Padding(part, (0, 0, 1, 2)))
    metrics = {name: course.as_json() for name, course in courses.items()}
    content = {"tags": run.tags, "params": params, "metrics": metrics, "artifacts": artifacts}
    return run.as_json() | content, Group(*lines)


def _facts(run: TrackedRun) -> dict[str, str]:
    over = f", took {duration(run.seconds)}" if run.ended is not None else ""
    newest = max((point.time for point in run.last.values()), default=0)
    # A killed run stays RUNNING in MLflow: show the age of its last values.
    age = f"{duration(max(0.0, time() - newest / 1000))} ago" if newest else "none yet"
    facts = {
        "experiment": run.experiment,
        "started": f"{moment(run.started)}{over}",
        "newest value": age if run.status == "RUNNING" else "",
        "steps": f"{run.steps} of {run.total_steps}" if run.total_steps else str(run.steps),
        "ranks": run.params.get(f"{OF_RUN}world_size", ""),
        "folder": shown_path(run.folder) if run.folder else "",
    }
    facts |= {name: run.tags.get(tag, "") for tag, name in _FACTS.items()}
    facts |= {key: value for key, value in run.tags.items() if not key.startswith(_OTHER_TAGS)}
    return {name: value for name, value in facts.items() if value}


def _metrics(courses: Mapping[str, Course], console: Console) -> Table:
    narrow = console.width < NARROW
    names = ("first", "last", *(() if narrow else ("lowest",)), "highest", "")
    rows = []
    for name, course in courses.items():
        lowest = () if narrow else (str(course.lowest),)
        curve = Text(sparkline(course, _SLIM if narrow else _WIDE, console.encoding), "cyan")
        rows.append([name, figures(course.first), figures(course.last), *lowest, str(course.highest), curve])
    return _table([("metric", False), *((heading, True) for heading in names)], rows)


# -- compare ---------------------------------------------------------------------------------------------


def compare_runs(source: Runs, runs: Sequence[TrackedRun], metrics: Sequence[str]) -> View:
    """Read the history of each metric in each run.

    Args:
        metrics: by default the main metrics of all runs.

    Raises:
        ConfigError: a run is given twice, or no run has a metric.
    """
    given = [(run.run_id, run.folder and run.folder.resolve()) for run in runs]
    for position, run in enumerate(runs):
        if given[position] in given[:position]:
            label = f"{run.name} {run.short_id}".strip()
            raise ConfigError("is given twice", "RUN", given=label, allowed="runs that differ")
    known = sorted({name for run in runs for name in run.last})
    problems = [
        Problem("no run has this metric", "--metric", given=metric, nearest=nearest(metric, known))
        for metric in metrics
        if metric not in known
    ]
    if problems:
        raise ConfigError(problems)
    names = dict.fromkeys(metrics or (name for run in runs for name in main_metrics(run)))
    courses = {name: [source.course(run, name) for run in runs] for name in names}
    keys = dict.fromkeys(key for run in runs for key in run.params)
    every = {key: [run.params.get(key) for run in runs] for key in keys}
    params = {key: row for key, row in every.items() if not all(same(row[0], value) for value in row)}
    ids = [run.run_id for run in runs]

    def by_run(row: Sequence[object]) -> dict[str, object]:
        # Copies of a folder have one id.
        is_id = [each != "" and ids.count(each) == 1 for each in ids]
        names = (run.run_id if ok else str(run.folder) for run, ok in zip(runs, is_id, strict=True))
        return dict(zip(names, row, strict=True))

    content = {
        "runs": [{"run_id": run.run_id, "name": run.name, "status": run.status} for run in runs],
        "params": {key: by_run(row) for key, row in params.items()},
        "metrics": {name: by_run([c and c.as_json() for c in row]) for name, row in courses.items()},
    }
    return content, _compare_tables(runs, params, courses)


def _compare_tables(
    runs: Sequence[TrackedRun],
    params: Mapping[str, Sequence[str | None]],
    courses: Mapping[str, Sequence[Course | None]],
) -> Group:
    """Build two tables with one column per run."""
    outcomes: list[Row] = [
        ["status", *(_status(run.status) for run in runs)],
        ["steps", *(str(run.steps) for run in runs)],
    ]
    for name, row in courses.items():
        outcomes.append([f"{name}, last", *(figures(course.last) if course else None for course in row)])
        if any(course is not None and len(course.points) > 1 for course in row):
            outcomes.append(["    lowest", *(str(course.lowest) if course else None for course in row)])
            outcomes.append(["    highest", *(str(course.highest) if course else None for course in row)])
    names = [f"{run.name}\n{run.short_id}".strip() for run in runs]
    columns = [
        (f"{name}\n{shown_path(run.folder)}" if names.count(name) > 1 and run.folder else name, False)
        for run, name in zip(runs, names, strict=True)
    ]
    differing = _table([("parameter", False), *columns], [[key, *row] for key, row in params.items()])
    no_difference = Text("the same parameters\n", "dim")
    return Group(differing if params else no_difference, _table([("metric", False), *columns], outcomes))


# -- open ------------------------------------------------------------------------------------------------


def places(run: TrackedRun, uri: str) -> tuple[dict[str, str], str | None]:
    """Return labelled addresses of a run in the store at `uri`, and the one that a browser can open now.

    A run without an id is not in a store, and has only its report.
    """
    report = _report(run)
    last = {"report": f"no {REPORT} here" if report is None else shown_path(report)}
    if not run.run_id:
        return last, None if report is None else report.as_uri()
    page, place = (of(uri, run.experiment_id, run.run_id) for of in (page_of, place_of))
    if page != place:
        return {"serve": place, "run": page, **last}, None if report is None else report.as_uri()
    return {"run": page, **last}, page if page.startswith("http") else None


def _report(run: TrackedRun) -> Path | None:
    """Return the report in the run's folder, unless a later run uses that folder; else among local
    artifacts."""
    folders = []
    followed = FollowedRun.read(run.folder) if run.folder is not None else None
    # A run without a key is read from its folder, and is the one that is there.
    if run.folder is not None and (followed.key if followed else None) == run.tags.get(KEY_TAG):
        folders.append(run.folder)
    parts = urlsplit(run.artifact_uri)
    if parts.scheme in ("", "file") and parts.path:
        folders.append(Path(url2pathname(parts.path)))
    return next((folder / REPORT for folder in folders if (folder / REPORT).is_file()), None)


# -- Tables --------------------------------------------------------------------------------------------


def _table(headings: Sequence[tuple[str, bool]], rows: Iterable[Row]) -> Table:
    """Build a table; True in a heading means that the column is never wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, no_wrap in headings:
        table.add_column(Text(heading), overflow="ellipsis" if no_wrap else "fold", no_wrap=no_wrap)
    for row in rows:
        cells = [Text("-", "dim") if cell is None else cell for cell in row]
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def _status(status: str) -> Text:
    return Text(status, STYLES.get(status, ""))


def _grid(rows: Mapping[str, str]) -> RenderableType:
    if not rows:
        return Text("none")
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table
