"""The MLflow run above those of a sweep: the grid as parameters, and at the end the table of results.

Its folder is the sweep's, and what it says lies there like that of any run: `grpox sync` ships what a server
missed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from grpox import __version__
from grpox.contracts import SweepContext, SweepResults
from grpox.errors import RunFailed, redact, redacted
from grpox.runtime.logs import get_logger
from grpox.toolkit import hold, write_whole
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.followed import FollowedRun
from grpox_mlflow.naming import TAG_LENGTH, changes
from grpox_mlflow.shipment import Shipment
from grpox_mlflow.store import is_passing, place_of, quick_requests, resolved_uri, told
from grpox_mlflow.table import SWEEP, table_text

logger = get_logger(__name__)

PARENT = "GRPOX_MLFLOW_PARENT"
"""Environment variable with the id of the run whose child a run is to be."""
NAMED = "GRPOX_MLFLOW_NAMED"
"""Environment variable that is set where a run is named after its folder, which says its setting."""
RUN_NAME = "tracking.mlflow.run_name"
PARENT_TAG = "mlflow.parentRunId"
"""By this tag MLflow shows a run below another."""


class ParentRun:
    """Made when a sweep begins, told of each run that ends.

    A store that cannot be used is told once; the sweep goes on and its folder keeps everything.

    Args:
        config: as the sweep's runs have it.
        sweep: its folder, and the grid, which becomes the parameters.

    Raises:
        ConfigError: another process writes this sweep to MLflow.
    """

    def __init__(self, config: MlflowConfig, sweep: SweepContext) -> None:
        self._folder = sweep.folder.absolute()
        self._are_named = RUN_NAME not in sweep.axes
        params = {key: ", ".join(values) for key, values in sweep.axes.items()}
        params |= {"sweep.run": sweep.source, "sweep.runs": str(sweep.runs)}
        self._uri = resolved_uri(config.tracking_uri)
        self._held = ExitStack()
        self._held.enter_context(hold(self._folder))
        for name in ("summary.json", "failure.json"):
            (self._folder / name).unlink(missing_ok=True)
        followed = self._followed(config, sweep.folder.name, redacted(params))
        followed.write(self._folder)
        self._shipment = Shipment(self._folder, followed, self._uri, live=True)
        self._told = False
        self._ship(self._shipment.open, begins=True)

    @property
    def run_id(self) -> str | None:
        """None while no store has it."""
        return self._shipment.followed.run_id

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the runs of the sweep hear of it."""
        named = {NAMED: "1"} if self._are_named else {}
        return named if self.run_id is None else {**named, PARENT: self.run_id}

    def update(self, results: SweepResults) -> None:
        """Record how many runs are complete, and the value of the best."""
        self._record(results)
        self._ship(self._shipment.ship)

    def conclude(self, results: SweepResults, status: str) -> None:
        """Record that the sweep is over, with its table; each run is made a child where it is none yet.

        Args:
            status: MLflow's.
        """
        self._record(results)
        runs, best = results.runs, results.best
        tags = {} if best is None else {"grpox.best": best.name, "grpox.best_run": best.run_id or ""}
        write_whole(self._folder / SWEEP, table_text(_rows(results)))
        if status == "FINISHED":
            write_whole(self._folder / "summary.json", json.dumps({"runs": len(runs), **_best(results)}) + "\n")
        elif status == "FAILED":
            error = f"{len(runs) - len(results.finished)} of {len(runs)} runs did not finish"
            write_whole(self._folder / "failure.json", json.dumps({"error": error}) + "\n")
        self._shipment.more_tags = {key: redact(value)[:TAG_LENGTH] for key, value in tags.items()}
        self._shipment.ending = (status, time.time_ns() // 1_000_000)
        self._told = False
        self._ship(lambda: self._end([run.run_id for run in runs if run.run_id is not None]))
        self._held.close()
        followed = self._shipment.followed
        if followed.run_id is not None and not self._told:
            place = place_of(self._uri, followed.experiment_id or "", followed.run_id)
            logger.info("MLflow run %s (%s): %s", followed.run_id, status, place)

    def _followed(self, config: MlflowConfig, name: str, params: Mapping[str, str]) -> FollowedRun:
        """The MLflow run that this sweep has from the last time, what has changed being tags; or a new one."""
        new = FollowedRun.begin(
            self._uri,
            config.experiment,
            params.items(),
            run_name=name,
            tags=redacted(
                {"grpox.version": __version__, "grpox.output_dir": str(self._folder), "grpox.sweep": "parent"}
                | config.tags
            ),
        )
        before = FollowedRun.read(self._folder)
        if before is None or before.tracking_uri != new.tracking_uri:
            return new
        return replace(before, tags=new.tags | changes(before.params, new.params))

    def _record(self, results: SweepResults) -> None:
        """Add a line to metrics.jsonl; its step is the number of runs that are complete."""
        finished = len(results.finished)
        metrics = {"sweep/finished": finished, **_best(results)}
        with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": finished, "time": time.time(), "metrics": metrics}) + "\n")

    def _end(self, children: Sequence[str]) -> None:
        self._shipment.ship()
        self._adopt(children)

    def _adopt(self, children: Sequence[str]) -> None:
        """Make runs children that began while the store was away, and so did not hear of their parent."""
        client = self._shipment.open()
        for child in children:
            if client.get_run(child).data.tags.get(PARENT_TAG) is None:
                client.set_tag(child, PARENT_TAG, str(self.run_id))

    def _ship(self, write: Callable[[], object], begins: bool = False) -> None:
        """Write to the store. That it cannot be is told once, and ends a sweep only where it has not begun.

        Raises:
            RunFailed: the sweep begins, and the store can never be used.
        """
        try:
            with quick_requests():
                write()
        except Exception as error:
            reason = f"MLflow at {redact(self._uri)} cannot be written to: {told(error)}"
            if begins and not is_passing(error):
                self._held.close()
                raise RunFailed(reason) from error
            if not self._told:
                logger.warning("%s\n    nothing is lost: grpox sync %s", reason, self._folder)
            self._told = True


def _best(results: SweepResults) -> dict[str, float]:
    best = results.best
    return {} if best is None or best.value is None else {f"best/{results.metric}": best.value}


def _rows(results: SweepResults) -> list[dict[str, object]]:
    """Make the table of results: one flat row a run, with a column for each axis."""
    return [
        {
            **run.setting,
            "status": run.status,
            results.metric: run.value,
            "best": run is results.best,
            "steps": run.steps,
            "seconds": run.seconds,
            "folder": run.folder,
            "run_id": run.run_id,
            "error": run.error,
        }
        for run in results.runs
    ]
