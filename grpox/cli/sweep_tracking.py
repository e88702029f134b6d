"""The run in MLflow whose children the runs of a sweep are; none where MLflow does not follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.cli.sweep_grid import Grid
from grpox.cli.sweep_results import Results
from grpox.config import RunConfig

if TYPE_CHECKING:
    from grpox_mlflow.parent import ParentRun

Say = Callable[[str], object]


@dataclass
class Parent:
    """What a sweep tells the tracker. A store that does not answer delays it by seconds and fails nothing."""

    run: ParentRun | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """By which the runs hear of it."""

    def update(self, results: Results) -> None:
        """One more run has ended."""
        if self.run is not None:
            self.run.update(_finished(results), _best(results))

    def conclude(self, results: Results, status: str) -> None:
        """The sweep is over: its table, and which run is the best."""
        if self.run is None:
            return
        best = results.best
        tags = {} if best is None else {"grpox.best": best.name, "grpox.best_run": best.run_id or ""}
        children = [result.run_id for result in results.runs if result.run_id is not None]
        self.run.conclude(_finished(results), _best(results), status, tags, children, results.as_rows())


def open_parent(config: RunConfig, folder: Path, grid: Grid, run: str, say: Say) -> Parent:
    """The parent of the runs that `config` is one of.

    Args:
        say: told where it is, or that the store does not answer.
    """
    if "mlflow" not in config.tracking:
        return Parent()
    from grpox_mlflow.configs import MlflowConfig
    from grpox_mlflow.parent import PARENT, ParentRun

    tracking = MlflowConfig.model_validate(config.tracking["mlflow"])
    params = {axis.key: ", ".join(axis.values) for axis in grid.axes}
    params |= {"sweep.run": run, "sweep.runs": str(len(list(grid.settings())))}
    parent = ParentRun(tracking, folder, params, say)
    return Parent(parent, {PARENT: parent.run_id} if parent.run_id else {})


def _finished(results: Results) -> int:
    return sum(result.status == "FINISHED" for result in results.runs)


def _best(results: Results) -> dict[str, float]:
    best = results.best
    return {} if best is None or best.value is None else {f"best/{results.metric}": best.value}
