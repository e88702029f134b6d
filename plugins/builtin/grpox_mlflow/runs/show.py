"""`grpox runs show`: one run, from its parameters to its artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING

from grpox_mlflow.runs.curves import Course, by_metric, course, main_metrics, sparkline
from grpox_mlflow.runs.params import OF_RUN, changed_params
from grpox_mlflow.runs.tracked import CHANGED_TAG, STYLES, Point, TrackedRun, figures, moment, shown_path

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from grpox_mlflow.runs.store import Store

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
"""Tag -> what it is called."""
_OTHER_TAGS = ("mlflow.", "grpox.", "version.", "plugin.", CHANGED_TAG)
"""What the tags begin with that the user did not give."""
_WIDE, _SLIM = 24, 12
"""Characters of a curve."""


@dataclass(frozen=True)
class Shown:
    """A run and what was asked for besides."""

    run: TrackedRun
    courses: Mapping[str, Course]
    artifacts: Mapping[str, int | None] | None
    """As `Store.artifacts`; None where they cannot be listed."""
    params: Mapping[str, str]
    """Those that are shown."""


def shown(store: Store, run: TrackedRun, every_param: bool) -> Shown:
    """Ask for the histories of the main metrics and the list of artifacts.

    Args:
        every_param: not only those that are not the default.
    """
    params = run.params if every_param else changed_params(run.params)
    courses = by_metric([course(store, run, metric) for metric in main_metrics(run)])
    return Shown(run, courses, _artifacts(store, run), params)


def as_json(told: Shown) -> str:
    """A JSON object, times in UTC."""
    run = told.run
    return json.dumps(
        {
            **run.as_json(),
            "tags": dict(run.tags),
            "params": dict(told.params),
            "metrics": {name: found.as_json() for name, found in told.courses.items()},
            "artifacts": told.artifacts,
        },
        indent=2,
    )


def as_text(told: Shown, every_param: bool, narrow: bool = False, encoding: str = "utf-8") -> Group:
    """For a terminal.

    Args:
        narrow: leave the lowest values out and draw shorter curves, for a terminal too narrow for them.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    run = told.run
    status = (run.status, STYLES.get(run.status, ""))
    heading = Text.assemble((run.name, "bold"), f"  {run.run_id}  ", status)
    of_params = "parameters" if every_param else "parameters that are not the default"
    parts = {
        "": _facts(run),
        of_params: _grid(told.params) if told.params else Text("none"),
        "resumed with": _grid(_resumed_with(run)) if _resumed_with(run) else None,
        "metrics": _metrics(told.courses, narrow, encoding) if told.courses else Text("none yet"),
        "artifacts": Text(_named(told.artifacts)),
    }
    lines: list[RenderableType] = [heading]
    for title, part in parts.items():
        if part is not None:
            lines += [Text(title, "bold")] if title else []
            lines.append(Padding(part, (0, 0, 1, 2)))
    return Group(*lines)


def _facts(run: TrackedRun) -> Table:
    from grpox.toolkit import duration

    over = f", took {duration(run.seconds)}" if run.ended is not None else ""
    facts = {
        "experiment": run.experiment,
        "started": f"{moment(run.started)}{over}",
        "newest value": _newest(run) if run.status == "RUNNING" else "",
        "steps": f"{run.steps} of {run.total_steps}" if run.total_steps else str(run.steps),
        "ranks": run.params.get(f"{OF_RUN}world_size", ""),
        "folder": shown_path(run.folder) if run.folder else "",
    }
    facts |= {name: run.tags.get(tag, "") for tag, name in _FACTS.items()}
    facts |= {key: value for key, value in run.tags.items() if not key.startswith(_OTHER_TAGS)}
    return _grid({name: value for name, value in facts.items() if value})


def _newest(run: TrackedRun) -> str:
    """A run whose process was killed stays RUNNING: the age of its values tells."""
    from grpox.toolkit import duration

    if not run.last:
        return "none yet"
    ago = time() - max(point.time for point in run.last.values()) / 1000
    return f"{duration(max(0.0, ago))} ago"


def _resumed_with(run: TrackedRun) -> dict[str, str]:
    changed = {key: value for key, value in run.tags.items() if key.startswith(CHANGED_TAG)}
    return {key.removeprefix(CHANGED_TAG): value for key, value in changed.items()}


def _grid(rows: Mapping[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table


def _metrics(courses: Mapping[str, Course], narrow: bool, encoding: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric", overflow="fold")
    for heading in ("first", "last", *(() if narrow else ("lowest",)), "highest"):
        table.add_column(heading, no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, of in courses.items():
        outermost = (of.highest,) if narrow else (of.lowest, of.highest)
        values = (figures(of.first.value), figures(of.last.value), *map(_at, outermost))
        curve = sparkline(of, _SLIM if narrow else _WIDE, encoding)
        table.add_row(Text(name), *map(Text, values), Text(curve, "cyan"))
    return table


def _at(point: Point) -> str:
    return f"{figures(point.value)} at {point.step}"


def _artifacts(store: Store, run: TrackedRun) -> Mapping[str, int | None] | None:
    try:
        return store.artifacts(run)
    except Exception:  # noqa: BLE001 - they may lie elsewhere than the runs, and out of reach
        return None


def _named(artifacts: Mapping[str, int | None] | None) -> str:
    from grpox.toolkit import counted

    if artifacts is None:
        return "cannot be listed from here"
    names: Sequence[str] = [
        name if files is None else f"{name}/ ({counted(files, 'file')})" for name, files in artifacts.items()
    ]
    return ", ".join(names) or "none"
