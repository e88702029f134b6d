"""Output of `grpox runs`: JSON for programs, and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.errors import ConfigError, Problem, nearest
from grpox.toolkit import Curve, binned, duration, escaped, parameter_defaults, pluralize
from grpox_mlflow.folders import (
    DEPTH,
    EVALUATION,
    OF_RUN,
    Course,
    Point,
    RunFolder,
    moment,
    newest_runs,
    shown_path,
    strict,
)
from grpox_mlflow.naming import CHANGED, flattened
from grpox_mlflow.store import page_of, place_of

STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
NINE_COLUMNS = 140
"""Width of a terminal below which the list of runs stacks its columns."""
NARROW = 100
"""Width below which tables of metrics omit their lowest value."""
REPORT = "report.html"
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""Eight heights of a curve, and their replacements if the terminal's encoding has no blocks."""
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


def list_runs(root: Path, status: str | None, last: int, console: Console) -> View:
    """Look up the newest runs below `root`.

    Raises:
        ConfigError: there is no such folder or status.
    """
    if status is not None and status.upper() not in STYLES:
        near, allowed = nearest(status.upper(), STYLES), ", ".join(STYLES)
        raise ConfigError("no such status", "--status", given=status, allowed=allowed, nearest=near)
    objects, rows = [], []
    for run in newest_runs(root, last, status and status.upper()):
        # The accuracy if there is one, else the first reward.
        metric = next((name for name in main_metrics(run) if name.startswith(EVALUATION)), None)
        course = run.course(metric) if metric else None
        reward = strict(run.last["reward"].value) if "reward" in run.last else None
        evaluation = None if course is None else {"metric": course.metric, **course.as_json()}
        objects.append({**run.as_json(), "reward": reward, "evaluation": evaluation})
        rows.append(_cells(run, course))
    if not rows:
        place = f"{root.absolute()}, {DEPTH} levels deep"
        return [], Text(f"no such run in {place}", no_wrap=True, overflow="ignore")
    return objects, _list_table(rows, console.width < NINE_COLUMNS)


def _list_table(rows: list[dict[str, str]], narrow: bool) -> Table:
    """Build one line per run; a narrow terminal stacks all but name and status in one column."""
    if len({cells["experiment"] for cells in rows}) == 1:
        for cells in rows:
            del cells["experiment"]  # the same for all runs
    if narrow:
        stacked: list[Row] = [[r["name"], _status(r["status"]), _stacked(r)] for r in rows]
        return _table([("name", False), ("status", True), ("", False)], stacked)
    headings = [(name, name in ("status", "started", "duration")) for name in rows[0]]
    return _table(
        headings, [[_status(text) if name == "status" else text for name, text in r.items()] for r in rows]
    )


def _cells(run: RunFolder, course: Course | None) -> dict[str, str]:
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
        "folder": shown_path(run.folder),
    }


def _stacked(cells: Mapping[str, str]) -> Text:
    first = (cells[name] for name in ("experiment", "folder") if name in cells)
    reward = f"reward {cells['reward']}" if cells["reward"] else ""
    second = (cells["started"], cells["duration"], f"{cells['steps']} steps", reward, cells["evaluation"])
    return _lines("  ".join(first), "  ".join(filter(None, second)))


# -- show ------------------------------------------------------------------------------------------------


def show_run(run: RunFolder, every_param: bool, console: Console) -> View:
    """Read the histories of the main metrics and the list of files.

    Args:
        every_param: True: include parameters with their default value.
    """
    courses = {name: course for name in main_metrics(run) if (course := run.course(name))}
    params = run.params if every_param else changed_params(run.params)
    resumed_with = {
        key.removeprefix(CHANGED): value for key, value in run.tags.items() if key.startswith(CHANGED)
    }
    artifacts: dict[str, int | None] | None = None
    listed = "cannot be listed from here"
    with suppress(OSError):  # of another user
        artifacts = run.artifacts()
        files = {name: "" if n is None else f"/ ({pluralize(n, 'file')})" for name, n in artifacts.items()}
        listed = ", ".join(f"{name}{count}" for name, count in files.items()) or "none"
    parts = {
        "": _grid(_facts(run)),
        "parameters" if every_param else "parameters that are not the default": _grid(params),
        "resumed with": _grid(resumed_with) if resumed_with else None,
        "metrics": _metrics(courses, console) if courses else Text("none yet"),
        "artifacts": Text(escaped(listed)),
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


def _facts(run: RunFolder) -> dict[str, str]:
    over = f", took {duration(run.seconds)}" if run.ended is not None else ""
    newest = max((point.time for point in run.last.values()), default=0)
    age = f"{duration(max(0.0, time() - newest / 1000))} ago" if newest else "none yet"
    facts = {
        "experiment": run.experiment,
        "started": f"{moment(run.started)}{over}",
        "newest value": age if run.status == "RUNNING" else "",
        "steps": f"{run.steps} of {run.total_steps}" if run.total_steps else str(run.steps),
        "ranks": run.params.get(f"{OF_RUN}world_size", ""),
        "folder": shown_path(run.folder),
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


def compare_runs(runs: Sequence[RunFolder], metrics: Sequence[str]) -> View:
    """Read the history of each metric in each run.

    Args:
        metrics: by default the main metrics of all runs.

    Raises:
        ConfigError: a run is given twice, or no run has a metric.
    """
    folders = [run.folder.resolve() for run in runs]
    for position, run in enumerate(runs):
        if folders[position] in folders[:position]:
            raise ConfigError("is given twice", "RUN", given=run.name, allowed="runs that differ")
    known = sorted({name for run in runs for name in run.last})
    problems = [
        Problem("no run has this metric", "--metric", given=metric, nearest=nearest(metric, known))
        for metric in metrics
        if metric not in known
    ]
    if problems:
        raise ConfigError(problems)
    names = dict.fromkeys(metrics or (name for run in runs for name in main_metrics(run)))
    courses = {name: [run.course(name) for run in runs] for name in names}
    keys = dict.fromkeys(key for run in runs for key in run.params)
    every = {key: [run.params.get(key) for run in runs] for key in keys}
    params = {key: row for key, row in every.items() if not all(same(row[0], value) for value in row)}
    ids = [run.run_id for run in runs]
    # Copies of a folder have one id.
    labels = [str(run.folder) if ids.count(run.run_id) > 1 else run.run_id or str(run.folder) for run in runs]

    def by_run(row: Sequence[object]) -> dict[str, object]:
        return dict(zip(labels, row, strict=True))

    content = {
        "runs": [{"run_id": run.run_id, "name": run.name, "status": run.status} for run in runs],
        "params": {key: by_run(row) for key, row in params.items()},
        "metrics": {name: by_run([c and c.as_json() for c in row]) for name, row in courses.items()},
    }
    return content, _compare_tables(runs, params, courses)


def _compare_tables(
    runs: Sequence[RunFolder],
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
    names = [run.name for run in runs]
    columns = [
        (_lines(run.name, shown_path(run.folder)) if names.count(run.name) > 1 else run.name, False)
        for run in runs
    ]
    differing = _table([("parameter", False), *columns], [[key, *row] for key, row in params.items()])
    no_difference = Text("the same parameters\n", "dim")
    return Group(differing if params else no_difference, _table([("metric", False), *columns], outcomes))


# -- open ------------------------------------------------------------------------------------------------


def places(run: RunFolder) -> tuple[dict[str, str], str | None]:
    """Return labelled addresses of a run, and the one that a browser can open now.

    A run without an id is not in a store, and has only its report.
    """
    report = run.folder / REPORT if (run.folder / REPORT).is_file() else None
    last = {"report": f"no {REPORT} here" if report is None else shown_path(report)}
    if run.followed is None or not run.run_id:
        return last, None if report is None else report.as_uri()
    uri, experiment_id = run.followed.tracking_uri, run.followed.experiment_id or ""
    page, place = (of(uri, experiment_id, run.run_id) for of in (page_of, place_of))
    if page != place:
        return {"serve": place, "run": page, **last}, None if report is None else report.as_uri()
    return {"run": page, **last}, page if page.startswith("http") else None


# -- Metrics and parameters ------------------------------------------------------------------------------


def main_metrics(run: RunFolder) -> list[str]:
    """Names of the run's main metrics: reward, KL, length, gradient norm, and those of evaluations."""
    kl = "kl" if "kl" in run.last else "sampling/kl"
    of_steps = ("reward", kl, "completions/mean_length", "grad_norm")
    rewards = sorted(n for n in run.last if n.startswith(f"{EVALUATION}rewards/") and n.endswith("/mean"))
    evaluated = (f"{EVALUATION}accuracy", *rewards, f"{EVALUATION}completions/mean_length")
    return [name for name in (*of_steps, *evaluated) if name in run.last]


def figures(point: Point) -> str:
    """Format a value to four figures."""
    return f"{point.value:.4g}"


def sparkline(course: Course, width: int, encoding: str = "utf-8") -> str:
    """Draw the values in at most `width` characters, scaled from lowest to highest; NaN is a gap."""
    # Infinity would flatten all other values.
    values = [point.value if abs(point.value) < 1e300 else math.nan for point in course.points]
    drawn = binned(Curve([float(point.step) for point in course.points], values), width).values
    blocks = BLOCKS if encoding.lower().startswith("utf") else PLAIN_BLOCKS
    numbers = [value for value in drawn if not math.isnan(value)]
    if not numbers:
        return ""
    low, span = min(numbers), max(numbers) - min(numbers)
    # A constant, except for rounding, is a line in the middle.
    moves = span > 1e-9 * max(map(abs, numbers))
    heights = {value: (value - low) / span if moves else 0.5 for value in numbers}
    return "".join(
        " " if math.isnan(value) else blocks[min(int(heights[value] * len(blocks)), len(blocks) - 1)]
        for value in drawn
    )


def changed_params(params: Mapping[str, str], registry: Any = None) -> dict[str, str]:
    """Return the params, as text, that differ from an empty run file's, including keys without a default.

    Args:
        params: dotted key -> value, as the plugin for MLflow writes them.
        registry: default: the installed components. If it lacks a component, every parameter of that component
            counts as changed.
    """
    defaults: dict[str, str] = {}
    for prefix, values in parameter_defaults(params, registry).items():
        defaults |= dict(flattened(dict(values), prefix))
    return {
        key: value
        for key, value in params.items()
        if not key.startswith(OF_RUN) and not (key in defaults and same(value, defaults[key]))
    }


def same(one: str | None, other: str | None) -> bool:
    """Tell whether two values are equal; numbers compare by value, as a run file may have 1 for 1.0."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False


# -- Tables --------------------------------------------------------------------------------------------


def _table(headings: Sequence[tuple[str | Text, bool]], rows: Iterable[Row]) -> Table:
    """Build a table; True in a heading means that the column is never wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, no_wrap in headings:
        heading = Text(escaped(heading)) if isinstance(heading, str) else heading
        table.add_column(heading, overflow="ellipsis" if no_wrap else "fold", no_wrap=no_wrap)
    for row in rows:
        cells = [Text("-", "dim") if cell is None else cell for cell in row]
        table.add_row(*(Text(escaped(cell)) if isinstance(cell, str) else cell for cell in cells))
    return table


def _lines(*lines: str) -> Text:
    return Text("\n").join(Text(escaped(line)) for line in lines)


def _status(status: str) -> Text:
    return Text(status, STYLES.get(status, ""))


def _grid(rows: Mapping[str, str]) -> RenderableType:
    if not rows:
        return Text("none")
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(escaped(name), "dim"), Text(escaped(value)))
    return table
