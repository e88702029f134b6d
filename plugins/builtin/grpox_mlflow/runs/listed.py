"""`grpox runs list`: the newest runs of a store, one a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpox.errors import ConfigError, Problem, nearest
from grpox_mlflow.runs.curves import Course, arrow, course, evaluated_metric
from grpox_mlflow.runs.tracked import (
    EVALUATION,
    STATUSES,
    STYLES,
    TrackedRun,
    figures,
    moment,
    shown_path,
    strict,
)

if TYPE_CHECKING:
    from rich.table import Table

    from grpox_mlflow.runs.store import Store


@dataclass(frozen=True)
class Row:
    """A run, and what its evaluations found."""

    run: TrackedRun
    evaluated: Course | None


def rows(store: Store, experiment: str | None, status: str | None, last: int) -> list[Row]:
    """The newest runs first: a search, and a request for each run that evaluates.

    Raises:
        ConfigError: there is no such experiment or status.
    """
    condition = "" if status is None else f"attributes.status = '{_status(status)}'"
    listed = []
    for run in store.search(condition, last, experiment):
        metric = evaluated_metric(run)
        listed.append(Row(run, course(store, run, metric) if metric else None))
    return listed


def as_json(listed: Sequence[Row]) -> str:
    """A JSON list of objects, times in UTC."""
    return json.dumps([_object(row) for row in listed], indent=2)


def as_table(listed: Sequence[Row], narrow: bool = False) -> Table:
    """For a terminal.

    Args:
        narrow: write all but id and status below the name, for a terminal too narrow for nine columns.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    every = [_cells(row) for row in listed]
    # The same of all, it is no news.
    left_out = {"experiment"} if len({row.run.experiment for row in listed}) == 1 else set[str]()
    headings = [heading for heading in (every[0] if every else ()) if heading not in left_out]
    for heading in ("run", "status", "") if narrow else headings:
        # Folded: what is cut cannot be given to `runs show`.
        table.add_column(heading, overflow="fold", no_wrap=heading in ("run", "status", "started", "duration"))
    for cells in every:
        status = Text(cells["status"], STYLES.get(cells["status"], ""))
        if narrow:
            table.add_row(cells["run"], status, Text(_stacked(cells, left_out)))
        else:
            table.add_row(*(status if name == "status" else Text(cells[name]) for name in headings))
    return table


def _status(given: str) -> str:
    status = given.upper()
    if status not in STATUSES:
        near = nearest(status, STATUSES)
        allowed = ", ".join(STATUSES)
        raise ConfigError(Problem("no such status", "--status", given=given, allowed=allowed, nearest=near))
    return status


def _cells(row: Row) -> dict[str, str]:
    from grpox.toolkit import duration

    run = row.run
    reward = run.last.get("reward")
    return {
        "run": run.short_id,
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "started": moment(run.started),
        # Of one that is not over, how long ago it started: that is no duration if it was killed.
        "duration": duration(run.seconds) if run.ended is not None else "",
        "steps": f"{run.steps}/{run.total_steps}" if run.total_steps else str(run.steps),
        "reward": figures(reward.value) if reward else "",
        "evaluation": _evaluation(row.evaluated),
        "folder": shown_path(run.folder) if run.folder else "",
    }


def _evaluation(found: Course | None) -> str:
    return "" if found is None else f"{found.metric.removeprefix(EVALUATION)} {arrow(found)}"


def _stacked(cells: Mapping[str, str], left_out: set[str]) -> str:
    first = "  ".join(cells[name] for name in ("name", "experiment", "folder") if name not in left_out)
    steps = f"{cells['steps']} steps"
    reward = f"reward {cells['reward']}" if cells["reward"] else ""
    second = (cells["started"], cells["duration"], steps, reward, cells["evaluation"])
    return f"{first}\n{'  '.join(told for told in second if told)}"


def _object(row: Row) -> dict[str, object]:
    run, found = row.run, row.evaluated
    reward = run.last.get("reward")
    return {
        **run.as_json(),
        "reward": None if reward is None else strict(reward.value),
        "evaluation": None if found is None else {"metric": found.metric, **found.as_json()},
    }
