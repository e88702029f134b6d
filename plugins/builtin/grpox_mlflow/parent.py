"""The MLflow run above those of a sweep: the grid as parameters, and at the end the table of results.

Its folder is the sweep's, and what it says lies there like that of any run: `grpox sync` ships what a server
missed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from grpox import __version__
from grpox.errors import RunFailed
from grpox.errors.redaction import redact, redacted
from grpox.runtime.files import write_whole
from grpox.runtime.run_lock import hold
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.followed import FollowedRun
from grpox_mlflow.naming import TAG_LENGTH, Names, changes, shortened
from grpox_mlflow.shipment import Shipment
from grpox_mlflow.store import is_passing, place_of, quick_requests, resolved_uri, told
from grpox_mlflow.table import SWEEP, table_text

PARENT = "GRPOX_MLFLOW_PARENT"
"""Environment variable with the id of the run whose child a run is to be."""
PARENT_TAG = "mlflow.parentRunId"
"""By this tag MLflow shows a run below another."""


class ParentRun:
    """Made when a sweep begins, told of each run that ends.

    A store that cannot be used is told once; the sweep goes on and its folder keeps everything.

    Args:
        config: as the sweep's runs have it.
        folder: the sweep's.
        params: the grid.
        say: told where it is, and what went wrong.

    Raises:
        ConfigError: another process writes this sweep to MLflow.
    """

    def __init__(
        self, config: MlflowConfig, folder: Path, params: Mapping[str, str], say: Callable[[str], object]
    ) -> None:
        self._folder, self._say = folder.absolute(), say
        self._uri = resolved_uri(config.tracking_uri)
        self._held = ExitStack()
        self._held.enter_context(hold(self._folder))
        for name in ("summary.json", "failure.json"):
            (self._folder / name).unlink(missing_ok=True)
        followed = self._followed(config, folder.name, redacted(dict(params)))
        followed.write(self._folder)
        self._shipment = Shipment(self._folder, followed, self._uri, live=True)
        self._told = False
        self._ship(self._shipment.open, begins=True)

    @property
    def run_id(self) -> str | None:
        """None while no store has it."""
        return self._shipment.followed.run_id

    def update(self, finished: int, values: Mapping[str, float]) -> None:
        """So many runs are complete, and the best of them has these values."""
        self._record(finished, values)
        self._ship(self._shipment.ship)

    def conclude(
        self,
        finished: int,
        values: Mapping[str, float],
        status: str,
        tags: Mapping[str, str],
        children: Sequence[str],
        rows: Sequence[Mapping[str, object]],
    ) -> None:
        """The sweep is over.

        Args:
            status: MLflow's.
            children: ids of the runs, each of which is made a child where it is none yet.
            rows: the table of results, one row a run.
        """
        self._record(finished, values)
        write_whole(self._folder / SWEEP, table_text(rows))
        if status == "FINISHED":
            write_whole(self._folder / "summary.json", json.dumps({"runs": len(rows), **values}) + "\n")
        elif status == "FAILED":
            error = f"{len(rows) - finished} of {len(rows)} runs did not finish"
            write_whole(self._folder / "failure.json", json.dumps({"error": error}) + "\n")
        self._shipment.more_tags = {key: redact(value)[:TAG_LENGTH] for key, value in tags.items()}
        self._shipment.ending = (status, time.time_ns() // 1_000_000)
        self._told = False
        self._ship(lambda: self._end(children))
        self._held.close()
        followed = self._shipment.followed
        if followed.run_id is not None and not self._told:
            place = place_of(self._uri, followed.experiment_id or "", followed.run_id)
            self._say(f"MLflow run {followed.run_id} ({status}): {place}")

    def _followed(self, config: MlflowConfig, name: str, params: Mapping[str, str]) -> FollowedRun:
        """The MLflow run that this sweep has from the last time, what has changed being tags; or a new one."""
        names = Names()
        new = FollowedRun(
            tracking_uri=redact(self._uri),
            experiment=config.experiment,
            key=uuid.uuid4().hex,
            start_time=time.time_ns() // 1_000_000,
            run_name=name,
            params={names[key]: shortened(value) for key, value in params.items()},
            tags=redacted(
                {"grpox.version": __version__, "grpox.output_dir": str(self._folder), "grpox.sweep": "parent"}
                | config.tags
            ),
        )
        before = FollowedRun.read(self._folder)
        if before is None or before.tracking_uri != new.tracking_uri:
            return new
        return replace(before, tags=new.tags | changes(before.params, new.params))

    def _record(self, finished: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl, whose step is the number of runs that are complete."""
        metrics = {"sweep/finished": finished, **values}
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
                self._say(f"warning: {reason}\n    nothing is lost: grpox sync {self._folder}")
            self._told = True
