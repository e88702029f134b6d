"""`grpox runs compare`: what separates the configs of runs, and what came of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpox.errors import ConfigError, Problem
from grpox_mlflow.runs.curves import Course, checked_metrics, course, main_metrics
from grpox_mlflow.runs.params import differing_params
from grpox_mlflow.runs.tracked import STYLES, TrackedRun, figures

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from grpox_mlflow.runs.store import Store


@dataclass(frozen=True)
class Compared:
    """Runs side by side; each list has a place for each run, None where that has nothing there."""

    runs: Sequence[TrackedRun]
    params: Mapping[str, Sequence[str | None]]
    """Those that are not the same in all runs."""
    courses: Mapping[str, Sequence[Course | None]]


def compared(store: Store, runs: Sequence[TrackedRun], metrics: Sequence[str]) -> Compared:
    """Ask for the history of each metric in each run.

    Args:
        metrics: by default those that `runs show` draws, of any of the runs.

    Raises:
        ConfigError: a run is given twice, or no run has a metric.
    """
    for place, run in enumerate(runs):
        if run.run_id in {before.run_id for before in runs[:place]}:
            raise ConfigError(Problem("is given twice", "RUN", given=run.label, allowed="runs that differ"))
    asked = checked_metrics(runs, metrics) or list(
        dict.fromkeys(name for run in runs for name in main_metrics(run))
    )
    courses = {metric: [course(store, run, metric) for run in runs] for metric in asked}
    return Compared(runs, differing_params(runs), courses)


def as_json(told: Compared) -> str:
    """A JSON object: the runs, and what differs and the metrics by run id."""
    ids = [run.run_id for run in told.runs]
    return json.dumps(
        {
            "runs": [{"run_id": run.run_id, "name": run.name, "status": run.status} for run in told.runs],
            "params": {key: dict(zip(ids, values, strict=True)) for key, values in told.params.items()},
            "metrics": {
                metric: {
                    run_id: None if of is None else of.as_json()
                    for run_id, of in zip(ids, courses, strict=True)
                }
                for metric, courses in told.courses.items()
            },
        },
        indent=2,
    )


def as_text(told: Compared) -> Group:
    """For a terminal: two tables, a column a run."""
    from rich.console import Group
    from rich.text import Text

    params = [(key, list(map(_value, values))) for key, values in told.params.items()]
    same = Text("the same parameters\n", "dim")
    return Group(
        _table("parameter", told.runs, params) if params else same,
        _table("metric", told.runs, [*_statuses(told.runs), *_outcomes(told.courses)]),
    )


def _table(heading: str, runs: Sequence[TrackedRun], rows: Sequence[tuple[str, list[Text]]]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heading, overflow="fold")
    for run in runs:
        table.add_column(Text(f"{run.name}\n{run.short_id}"), overflow="fold")
    for name, cells in rows:
        table.add_row(Text(name), *cells)
    return table


def _value(value: str | None) -> Text:
    from rich.text import Text

    return Text("-", "dim") if value is None else Text(value)


def _statuses(runs: Sequence[TrackedRun]) -> Iterator[tuple[str, list[Text]]]:
    from rich.text import Text

    yield "status", [Text(run.status, STYLES.get(run.status, "")) for run in runs]
    yield "steps", [Text(str(run.steps)) for run in runs]


def _outcomes(courses: Mapping[str, Sequence[Course | None]]) -> Iterator[tuple[str, list[Text]]]:
    for metric, of_runs in courses.items():
        yield f"{metric}, last", [_value(None if of is None else figures(of.last.value)) for of in of_runs]
        if any(of is not None and len(of.points) > 1 for of in of_runs):
            yield "    lowest", [_value(_outermost(of, lowest=True)) for of in of_runs]
            yield "    highest", [_value(_outermost(of, lowest=False)) for of in of_runs]


def _outermost(of: Course | None, lowest: bool) -> str | None:
    if of is None:
        return None
    point = of.lowest if lowest else of.highest
    return f"{figures(point.value)} at {point.step}"
