"""Output of `grpox runs`: JSON for programs, and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
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
    RunFolder,
    moment,
    run_folders,
    shown_path,
)
from grpox_mlflow.naming import CHANGED, flattened
from grpox_mlflow.store import addresses

STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
EIGHT_COLUMNS, NARROW = 140, 100
"""Width of a terminal below which the list of runs stacks its columns; and tables omit the lowest value."""
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""Eight heights of a curve, and their replacements if the terminal's encoding has no blocks."""
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

Cell = str | Text | None
View = tuple[object, RenderableType]
"""The same content twice: as JSON for programs, with times in UTC, and for the terminal."""


def list_runs(root: Path, status: str | None, most: int, console: Console) -> View:
    """Show the newest runs below `root`, at most `most`, with one status if it is given.

    Raises:
        ConfigError: there is no such folder or status.
    """
    if status is not None and status.upper() not in STYLES:
        near, allowed = nearest(status.upper(), STYLES), ", ".join(STYLES)
        raise ConfigError("no such status", "--status", given=status, allowed=allowed, nearest=near)
    if not root.is_dir():
        raise ConfigError("no such folder", "FOLDER", given=str(root))
    runs = (RunFolder(folder, is_whole=False) for folder in run_folders(root))
    wanted = [run for run in runs if status is None or run.status == status.upper()]
    shown = sorted(wanted, key=lambda run: run.started, reverse=True)[:most]
    if not shown:
        place = f"{root.absolute()}, {DEPTH} levels deep"
        return [], Text(f"no such run in {place}", no_wrap=True, overflow="ignore")
    objects: list[object] = []
    rows: list[dict[str, str]] = []
    for run in shown:
        # The accuracy if there is one, else the first reward.
        metric = next((name for name in run.main_metrics() if name.startswith(EVALUATION)), "")
        course = run.courses.get(metric, {})
        ends = [*course.values()][:: max(len(course) - 1, 1)]
        evaluation = {"metric": metric, **_as_json(course)} if course else None
        reward = next(reversed(run.courses.get("reward", {}).values()), None)
        objects.append({**run.as_json(), "reward": _strict(reward), "evaluation": evaluation})
        rows.append(
            {
                "name": run.name,
                "status": run.status,
                "started": moment(run.started),
                # Of a run without an end, the time since its start is no duration if it was killed.
                "duration": "" if run.ended is None else duration(run.seconds),
                "steps": f"{run.steps}/{run.total_steps}" if run.total_steps else str(run.steps),
                "reward": "" if reward is None else _figures(reward),
                "evaluation": f"{metric.removeprefix(EVALUATION)} {' -> '.join(map(_figures, ends))}".strip(),
                "folder": shown_path(run.folder),
            }
        )
    if console.width >= EIGHT_COLUMNS:
        return objects, _table(rows[0], [[*row.values()] for row in rows], ("status", "started", "duration"))
    stacked: list[list[Cell]] = []
    for row in rows:
        reward_text = f"reward {row['reward']}" if row["reward"] else ""
        second = (row["started"], row["duration"], f"{row['steps']} steps", reward_text, row["evaluation"])
        stacked.append([row["name"], row["status"], _lines(row["folder"], "  ".join(filter(None, second)))])
    return objects, _table(["name", "status", ""], stacked, ["status"])


def show_run(run: RunFolder, has_all_params: bool, console: Console) -> View:
    """Show a run with the courses of its main metrics and its files.

    Args:
        has_all_params: True: include parameters with their default value.
    """
    courses = {name: run.courses[name] for name in run.main_metrics()}
    params = run.params if has_all_params else changed_params(run.params)
    changes = {key.removeprefix(CHANGED): text for key, text in run.tags.items() if key.startswith(CHANGED)}
    artifacts: dict[str, int | None] | None = None
    listed = "cannot be listed from here"
    with suppress(OSError):  # a folder of another user
        artifacts = {
            entry.name: sum(1 for _ in entry.iterdir()) if entry.is_dir() else None
            for entry in sorted(run.folder.iterdir())
            if not entry.name.startswith(".") and entry.suffix not in (".lock", ".pid")
        }
        listed = ", ".join(
            name if n is None else f"{name}/ ({pluralize(n, 'file')})" for name, n in artifacts.items()
        )
    parts = {
        "": _grid(_facts(run)),
        "parameters" if has_all_params else "parameters that are not the default": _grid(params),
        "resumed with": _grid(changes) if changes else None,
        "metrics": _courses_table(courses, console) if courses else Text("none yet"),
        "artifacts": _cell(listed),
    }
    identity = [Text(run.name, "bold"), *([Text(run.run_id)] if run.run_id else []), _cell(run.status)]
    lines: list[RenderableType] = [Text("  ").join(identity)]
    for title, part in parts.items():
        if part is not None:
            lines += [Text(title, "bold")] if title else []
            lines.append(Padding(part, (0, 0, 1, 2)))
    metrics = {name: _as_json(course) for name, course in courses.items()}
    content = {"tags": run.tags, "params": params, "metrics": metrics, "artifacts": artifacts}
    return run.as_json() | content, Group(*lines)


def _facts(run: RunFolder) -> dict[str, str]:
    facts = {
        "experiment": run.experiment,
        "started": moment(run.started) + ("" if run.ended is None else f", took {duration(run.seconds)}"),
        "steps": f"{run.steps} of {run.total_steps}" if run.total_steps else str(run.steps),
        "ranks": run.params.get(f"{OF_RUN}world_size", ""),
        "folder": shown_path(run.folder),
    }
    facts |= {name: run.tags.get(tag, "") for tag, name in _FACTS.items()}
    facts |= {key: value for key, value in run.tags.items() if not key.startswith(_OTHER_TAGS)}
    return {name: value for name, value in facts.items() if value}


def _courses_table(courses: Mapping[str, Course], console: Console) -> Table:
    is_narrow = console.width < NARROW
    headings = ["first", "last", *(() if is_narrow else ("lowest",)), "highest"]
    rows: list[list[Cell]] = []
    for name, course in courses.items():
        points = landmarks(course)
        values = [_figures(points[k][1]) if k in ("first", "last") else _point(*points[k]) for k in headings]
        curve = sparkline(course, 12 if is_narrow else 24, console.encoding)
        rows.append([name, *values, Text(curve, "cyan")])
    return _table(["metric", *headings, ""], rows, [*headings, ""])


def compare_runs(runs: Sequence[RunFolder], metrics: Sequence[str]) -> View:
    """Show the parameters that differ and the values of metrics, by default the main metrics of all runs.

    Raises:
        ConfigError: a run is given twice, or no run has a metric.
    """
    folders = [run.folder.resolve() for run in runs]
    for position, run in enumerate(runs):
        if folders[position] in folders[:position]:
            raise ConfigError("is given twice", "RUN", given=run.name, allowed="runs that differ")
    known = sorted({name for run in runs for name in run.courses})
    unknown = [metric for metric in metrics if metric not in known]
    if unknown:
        what = "no run has this metric"
        raise ConfigError([Problem(what, "--metric", given=m, nearest=nearest(m, known)) for m in unknown])
    keys = dict.fromkeys(key for run in runs for key in run.params)
    every = {key: [run.params.get(key) for run in runs] for key in keys}
    params = {key: row for key, row in every.items() if not all(same(row[0], value) for value in row)}
    names = dict.fromkeys(metrics or (name for run in runs for name in run.main_metrics()))
    courses = {name: [run.courses.get(name) for run in runs] for name in names}
    ids = [run.run_id for run in runs]
    # Copies of a folder have one id.
    labels = [str(run.folder) if ids.count(run.run_id) > 1 else run.run_id or str(run.folder) for run in runs]
    content = {
        "runs": [{"run_id": run.run_id, "name": run.name, "status": run.status} for run in runs],
        "params": {key: dict(zip(labels, row, strict=True)) for key, row in params.items()},
        "metrics": {
            name: dict(zip(labels, (course and _as_json(course) for course in row), strict=True))
            for name, row in courses.items()
        },
    }
    rows: list[list[Cell]] = [
        ["status", *(run.status for run in runs)],
        ["steps", *(str(r.steps) for r in runs)],
    ]
    for name, row in courses.items():
        points = [landmarks(course) if course else {} for course in row]
        rows.append([f"{name}, last", *(_figures(each["last"][1]) if each else None for each in points)])
        for kind in ("lowest", "highest") if any(course and len(course) > 1 for course in row) else ():
            rows.append([f"    {kind}", *(_point(*each[kind]) if each else None for each in points)])
    titles = [run.name for run in runs]
    columns = [
        _lines(run.name, shown_path(run.folder)) if titles.count(run.name) > 1 else run.name for run in runs
    ]
    differing = _table(["parameter", *columns], [[key, *row] for key, row in params.items()])
    none = Text("the same parameters\n", "dim")
    return content, Group(differing if params else none, _table(["metric", *columns], rows))


def places(run: RunFolder) -> tuple[dict[str, str], str | None]:
    """Return labelled addresses of a run, and the one that a browser can open now.

    A run without an id is not in a store, and has only its report.
    """
    path, link = run.folder / "report.html", run.link
    report = {"report": shown_path(path) if path.is_file() else f"no {path.name} here"}
    now = path.as_uri() if path.is_file() else None
    pages = addresses(link.tracking_uri, link.experiment_id or "", run.run_id) if link and run.run_id else {}
    if pages and "serve" not in pages:
        now = pages["run"] if pages["run"].startswith("http") else None
    return pages | report, now


# -- Values ----------------------------------------------------------------------------------------------


def landmarks(course: Course) -> dict[str, tuple[int, float]]:
    """Return (step, value) of first, last, lowest and highest; NaN only where there is no other value."""
    points, value = [*course.items()], itemgetter(1)
    numbers = [point for point in points if not math.isnan(point[1])] or points
    lowest, highest = min(numbers, key=value), max(numbers, key=value)
    return {"first": points[0], "last": points[-1], "lowest": lowest, "highest": highest}


def _as_json(course: Course) -> dict[str, object]:
    points = landmarks(course).items()
    return {kind: {"step": step, "value": _strict(value)} for kind, (step, value) in points}


def _strict(value: float | None) -> float | str | None:
    """Return a number for JSON; NaN and infinities, which JSON lacks, as text like in metrics.jsonl."""
    return value if value is None or math.isfinite(value) else str(value)


def _figures(value: float) -> str:
    return f"{value:.4g}"


def _point(step: int, value: float) -> str:
    return f"{_figures(value)} at {step}"


def sparkline(course: Course, width: int, encoding: str = "utf-8") -> str:
    """Draw the values in at most `width` characters, scaled from lowest to highest; NaN is a gap."""
    # Infinity would flatten all other values.
    values = [value if abs(value) < 1e300 else math.nan for value in course.values()]
    drawn = binned(Curve([float(step) for step in course], values), width).values
    blocks = BLOCKS if encoding.lower().startswith("utf") else PLAIN_BLOCKS
    numbers = [value for value in drawn if not math.isnan(value)] or [0.0]
    low, span = min(numbers), max(numbers) - min(numbers)
    # A constant, except for rounding, is a line in the middle.
    is_constant = span <= 1e-9 * max(map(abs, numbers))
    heights = (value if math.isnan(value) else 0.5 if is_constant else (value - low) / span for value in drawn)
    line = "".join(" " if math.isnan(each) else blocks[min(int(each * 8), 7)] for each in heights)
    return line if line.strip() else ""


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
    of_file = {key: value for key, value in params.items() if not key.startswith(OF_RUN)}
    return {key: value for key, value in of_file.items() if not same(value, defaults.get(key))}


def same(one: str | None, other: str | None) -> bool:
    """Tell whether two values are equal; numbers compare by value, as a run file may have 1 for 1.0."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False


# -- Tables ----------------------------------------------------------------------------------------------


def _table(headings: Iterable[Cell], rows: Iterable[Sequence[Cell]], whole: Sequence[str] = ()) -> Table:
    """Build a table; the columns named in `whole` are never wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        is_whole = heading in whole
        table.add_column(_cell(heading), overflow="ellipsis" if is_whole else "fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(content: Cell) -> Text:
    if content is None:
        return Text("-", "dim")
    return _lines(content) if isinstance(content, str) else content


def _lines(*lines: str) -> Text:
    return Text("\n").join(Text(escaped(line), STYLES.get(line, "")) for line in lines)


def _grid(rows: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(escaped(name), "dim"), Text(escaped(value)))
    return table if rows else Text("none")
