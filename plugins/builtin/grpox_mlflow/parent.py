"""The parent MLflow run of a sweep's runs: the grid as parameters, and at the end the table of results.

The sweep's folder has the same files as the folder of any run, so `grpox sync` ships data that a server missed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack

from grpox import __version__
from grpox.contracts import SweepContext, SweepResults
from grpox.errors import RunFailed, redact, redacted
from grpox.runtime.logs import get_logger
from grpox.toolkit import hold, write_atomically
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.contents import SWEEP_TABLE, table_text
from grpox_mlflow.link import RunLink
from grpox_mlflow.naming import PARENT_TAG, TAG_LENGTH
from grpox_mlflow.shipment import Shipment
from grpox_mlflow.store import format_error, is_passing, quick_requests, resolved_uri

logger = get_logger(__name__)

PARENT = "GRPOX_MLFLOW_PARENT"
"""Environment variable with the id of the parent run."""
NAMED = "GRPOX_MLFLOW_NAMED"
"""Environment variable that names a run after its folder, which describes the run's setting."""
RUN_NAME = "tracking.mlflow.run_name"


class ParentRun:
    """Tracks a sweep: its start, each run that ends, and its end.

    An outage of the store causes one warning; the sweep continues, and its folder has all data.

    Args:
        config: MLflow config of the sweep's runs.
        sweep: the sweep's folder and grid; the grid becomes the parameters.

    Raises:
        ConfigError: another process writes this sweep to MLflow.
        RunFailed: the store can never be used.
    """

    def __init__(self, config: MlflowConfig, sweep: SweepContext) -> None:
        self._folder = sweep.folder.absolute()
        self._are_named = RUN_NAME not in sweep.axes
        self._uri = resolved_uri(config.tracking_uri)
        self._lock = ExitStack()
        self._lock.enter_context(hold(self._folder))
        for name in ("summary.json", "failure.json"):
            (self._folder / name).unlink(missing_ok=True)
        params = {key: ", ".join(values) for key, values in sweep.axes.items()}
        params |= {"sweep.run": sweep.source, "sweep.runs": str(sweep.runs)}
        tags = {"grpox.version": __version__, "grpox.sweep": "parent"}
        params = redacted(params).items()
        link = RunLink.begin(self._folder, self._uri, config, sweep.folder.name, params, tags)
        self._shipment = Shipment(self._folder, link, self._uri, live=True)
        self._is_away = False
        self._ship(self._shipment.open, begins=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that name the parent to the sweep's runs."""
        return {**({PARENT: self.run_id} if self.run_id else {}), **({NAMED: "1"} if self._are_named else {})}

    @property
    def run_id(self) -> str | None:
        """Id in the store; None until the run is created."""
        return self._shipment.link.run_id

    def update(self, results: SweepResults) -> None:
        """Record the number of complete runs and the best value."""
        self._record(results)
        self._ship(self._shipment.ship)

    def conclude(self, results: SweepResults, status: str) -> None:
        """Record the end of the sweep with its table, and set this parent in every run without one.

        Args:
            status: MLflow's status.
        """
        value = self._record(results)
        runs, best = results.runs, results.best
        names = ("steps", "seconds", "folder", "run_id", "error")
        rows = [
            {**run.setting, "status": run.status, results.metric: run.value, "best": run is best}
            | {name: getattr(run, name) for name in names}
            for run in runs
        ]
        write_atomically(self._folder / SWEEP_TABLE, table_text(rows))
        if status == "FINISHED":
            write_atomically(self._folder / "summary.json", json.dumps({"runs": len(runs), **value}) + "\n")
        elif status == "FAILED":
            error = f"{len(runs) - len(results.finished)} of {len(runs)} runs did not finish"
            write_atomically(self._folder / "failure.json", json.dumps({"error": error}) + "\n")
        tags = {} if best is None else {"grpox.best": best.name, "grpox.best_run": best.run_id or ""}
        shown = {key: redact(text)[:TAG_LENGTH] for key, text in tags.items()}
        self._shipment.note(tags=self._shipment.link.tags | shown)
        self._shipment.ending = (status, time.time_ns() // 1_000_000)
        self._is_away = False
        self._ship(lambda: self._end(results))
        self._lock.close()
        if self.run_id is not None and not self._is_away:
            logger.info("MLflow run %s (%s): %s", self.run_id, status, self._shipment.place)

    def _record(self, results: SweepResults) -> dict[str, float]:
        """Append a line to metrics.jsonl, with complete runs as its step; return the best value."""
        best, finished = results.best, len(results.finished)
        value = {} if best is None or best.value is None else {f"best/{results.metric}": best.value}
        line = {"step": finished, "time": time.time(), "metrics": {"sweep/finished": finished, **value}}
        with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return value

    def _end(self, results: SweepResults) -> None:
        """Ship the rest, and set the parent of runs that began during an outage of the store."""
        self._shipment.ship()
        client = self._shipment.open()
        for run in results.runs:
            if run.run_id is not None and client.get_run(run.run_id).data.tags.get(PARENT_TAG) is None:
                client.set_tag(run.run_id, PARENT_TAG, str(self.run_id))

    def _ship(self, write: Callable[[], object], begins: bool = False) -> None:
        """Write to the store; an error causes a warning, and ends a sweep only at its start.

        Raises:
            RunFailed: the sweep begins, and the store can never be used.
        """
        try:
            with quick_requests():
                write()
        except Exception as error:
            reason = f"MLflow at {redact(self._uri)} cannot be written to: {format_error(error)}"
            if begins and not is_passing(error):
                self._lock.close()
                raise RunFailed(reason) from error
            if not self._is_away:
                logger.warning("%s\n    nothing is lost: grpox sync %s", reason, self._folder)
            self._is_away = True
