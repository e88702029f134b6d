"""Tracks a run in MLflow. The run records its data in its folder; a background thread ships it from there.

A hook only wakes that thread, so an unreachable server costs neither time nor values. The store is opened when
the run starts: this takes 2 s (5 s for a new SQLite file) of the interpreter's lock, and a wrong address is an
error before the model loads. If the store does not answer, the run starts without it.
"""

from __future__ import annotations

import getpass
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox import hookimpl
from grpox.errors import RunClosed, RunFailed, redact, redacted
from grpox.runtime.logs import get_logger
from grpox.toolkit import LOCK_FILE, read_lock
from grpox_mlflow.contents import EVAL_TABLE, datasets_of
from grpox_mlflow.link import FILE, RunLink
from grpox_mlflow.naming import NAME_LENGTH, PARENT_TAG, MlflowNames, flattened
from grpox_mlflow.parent import NAMED, PARENT, ParentRun
from grpox_mlflow.shipment import Shipment
from grpox_mlflow.store import format_error, is_passing, quick_requests, resolved_uri
from grpox_mlflow.traces import FILE as TRACES
from grpox_mlflow.traces import TracedRollouts

if TYPE_CHECKING:
    from grpox.contracts import RunContext, ScoredRollout, SweepContext, SweepResults
    from grpox_mlflow.configs import MlflowConfig

logger = get_logger(__name__)
CLOSE_SECONDS = 20.0
"""Seconds that the end of a run waits for data that is not written yet."""
UPLOAD_BYTES_PER_SECOND = 20e6
"""Upload rate in bytes per second that extends this wait if a model is to be uploaded."""
REQUEST_SECONDS = 30
"""Seconds that the background thread waits for an answer."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
INTERVAL, LONGEST = 1.0, 30.0
"""Seconds from the end of one write to the next, at least and at most."""
SHARE = 0.1
"""Largest share of the time spent writing, because writing takes the interpreter's lock from the run."""


class MlflowTracker:
    """Records parameters, metrics, completions, checkpoints and the final status of a run in MLflow.

    Every write names its run, so MLflow's active run is neither read nor changed. When the store stops
    accepting values, the next hook call logs this once. An outage is not counted as a failure of the observer,
    so it changes no metric of the run.
    """

    files = (FILE, TRACES, EVAL_TABLE)
    stateless = True

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._writer: Writer | None = None
        self._environment = ExitStack()
        self._parent: ParentRun | None = None

    @hookimpl
    def grpox_run_started(self, run: RunContext) -> None:
        """Start tracking; raises RunFailed if the store can never be used."""
        self._uri = resolved_uri(self._config.tracking_uri)
        # Absolute, because the process may change folders.
        self._folder = run.output_dir.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        dumped = redacted(run.config.model_dump(mode="json"))
        of_run = {"world_size": run.world_size, "total_steps": run.total_steps}
        link = RunLink.begin(
            self._folder,
            self._uri,
            self._config,
            self._name(),
            flattened({**dumped, "run": of_run}),
            self._tags(run),
            # The terminal counts from there too: loading the libraries is part of the run's time.
            run.started,
            None if run.resumed_at is None else f" after step {run.resumed_at}",
            datasets=datasets_of(run),
            registration=self._registration(run),
        )
        self._traced = TracedRollouts(self._folder, self._config.traces, run.config.train.seed)
        self._shipment = Shipment(self._folder, link, self._uri, live=True)
        try:
            with quick_requests():
                self._shipment.open()
        except Exception as error:
            if not is_passing(error):
                raise RunFailed(
                    f"MLflow cannot use the tracking store {redact(self._uri)}: {format_error(error)}\n"
                    "    start it (mlflow server --host 127.0.0.1 --port 5000), name another one in\n"
                    "    tracking.mlflow.tracking_uri or MLFLOW_TRACKING_URI (sqlite:///mlflow.db needs no\n"
                    "    server), or train without MLflow: tracking={}"
                ) from error
            self._warn(error)
        # The thread retries by itself.
        self._environment.enter_context(quick_requests(REQUEST_SECONDS))
        self._writer = Writer(self._shipment.ship)
        self._writer.wake()

    @hookimpl
    def grpox_rollouts_scored(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        self._traced.draw(step, rollouts)
        self._wake()

    @hookimpl
    def grpox_step_finished(self, metrics: Mapping[str, float]) -> None:
        self._traced.write(metrics)
        self._wake()

    @hookimpl
    def grpox_evaluated(self) -> None:
        self._shipment.is_table_due = True
        self._wake()

    @hookimpl
    def grpox_checkpoint_saved(self) -> None:
        self._wake()

    @hookimpl
    def grpox_run_failed(self, error: BaseException) -> None:
        if self._writer is None:
            return
        self._traced.write({})
        # Ctrl-C, SIGTERM, SystemExit; or the caller ended it.
        killed = isinstance(error, RunClosed) or not isinstance(error, Exception)
        self._close(self._writer, "KILLED" if killed else "FAILED")

    @hookimpl
    def grpox_run_finished(self) -> None:
        if self._writer is not None:
            self._close(self._writer, "FINISHED")

    @hookimpl
    def grpox_sweep_started(self, sweep: SweepContext) -> dict[str, str]:
        """Start tracking a sweep; raises RunFailed if the store can never be used."""
        self._parent = ParentRun(self._config, sweep)
        return self._parent.environment

    @hookimpl
    def grpox_sweep_run_ended(self, results: SweepResults) -> None:
        if self._parent is not None:
            self._parent.update(results)

    @hookimpl
    def grpox_sweep_finished(self, results: SweepResults, status: str) -> None:
        if self._parent is not None:
            self._parent.conclude(results, status)

    @hookimpl
    def grpox_tracked_run(self, folder: Path) -> str | None:
        link = RunLink.read(folder)
        return None if link is None else link.run_id

    def _name(self) -> str:
        """Return the run file's name, else the folder's; runs of a sweep share the first, and have both."""
        name, folder = self._config.run_name, self._folder.name
        if name and os.environ.get(NAMED):
            name = f"{name} {folder}"
        # The end of a long name, as those of a sweep begin alike.
        return (name or folder)[-NAME_LENGTH:]

    def _registration(self, run: RunContext) -> dict[str, Any] | None:
        """Return the settings of the registered model; the run file's criterion for checkpoints compares its
        versions."""
        checkpoint = run.config.checkpoint
        if self._config.register_as is None:
            return None
        return {
            "name": self._config.register_as,
            "upload_gib": self._config.upload_gib,
            "metric": checkpoint.best or run.config.main_metric,
            "lowest": checkpoint.best is not None and checkpoint.best_is in ("lowest", "min"),
            "versions": dict(run.versions),
        }

    def _tags(self, run: RunContext) -> dict[str, str]:
        from mlflow.utils import mlflow_tags

        names = MlflowNames()
        tags = {names[f"version.{name}"]: version for name, version in run.versions.items()}
        tags |= {
            "grpox.version": run.versions.get("grpox", "unknown"),
            mlflow_tags.MLFLOW_SOURCE_NAME: run.source,
            mlflow_tags.MLFLOW_SOURCE_TYPE: "LOCAL",
            # A container may run under a user id without a name.
            mlflow_tags.MLFLOW_USER: "unknown",
        }
        with suppress(KeyError, OSError):
            tags[mlflow_tags.MLFLOW_USER] = getpass.getuser()
        if (self._folder / LOCK_FILE).exists():
            lock = read_lock(self._folder)
            tags["grpox.lock"] = lock.digest[:12]
            tags |= {names[f"plugin.{name}"]: each.version for name, each in lock.distributions.items()}
        if parent := os.environ.get(PARENT):
            tags[PARENT_TAG] = parent
        if run.git_commit is not None:
            tags |= {"grpox.git.commit": run.git_commit, mlflow_tags.MLFLOW_GIT_COMMIT: run.git_commit}
        return tags

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "MLflow at %s does not accept the run's data: %s\n"
            "    the run continues and saves the data; it is written when MLflow answers, or afterwards by\n"
            "    grpox sync %s",
            redact(self._uri),
            format_error(error),
            self._folder,
        )

    def _wake(self) -> None:
        """Wake the writer, and log its last error."""
        if self._writer is None:
            raise RunFailed("the MLflow run has ended")
        self._writer.wake()
        if (error := self._writer.take_error()) is not None:
            self._warn(error)

    def _close(self, writer: Writer, status: str) -> None:
        """Write all remaining data and the final status, and log the run's location; raise if time ran out."""
        self._writer = None
        self._shipment.ending = (status, time.time_ns() // 1_000_000)
        seconds = CLOSE_SECONDS + self._shipment.upload_bytes() / UPLOAD_BYTES_PER_SECOND
        progress = "MLflow: %s left to write (waiting at most %.0f s)"
        in_time = writer.close(seconds, lambda: logger.info(progress, self._shipment.lacking(), seconds))
        self._environment.close()
        if not in_time:
            error = writer.take_error()
            raise RunFailed(
                f"MLflow at {redact(self._uri)} lacks {self._shipment.lacking()} and the outcome of the run"
                f"{f': {format_error(error)}' if error else ''}\n    nothing is lost: grpox sync {self._folder}"
            )
        logger.info("MLflow run %s (%s): %s", self._shipment.link.run_id, status, self._shipment.place)


class Writer:
    """Calls `write` in its own thread when woken, and retries after an error until it succeeds.

    Nothing is queued: the data is on the disk, and `write` knows its position.

    Args:
        write: writes all data that waits.
        pauses: seconds of pause after the first, second, ... error in a row; then the last value each time.
    """

    def __init__(self, write: Callable[[], object], pauses: tuple[float, ...] = PAUSES) -> None:
        self._write = write
        self._pauses = pauses
        self._error: Exception | None = None
        self._due, self._closing, self._stopped = threading.Event(), threading.Event(), threading.Event()
        # A daemon thread: a hanging server must not prevent the end of the process after `close` has given up.
        self._thread = threading.Thread(target=self._work, name="mlflow-writer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread; never blocks."""
        self._due.set()

    def take_error(self) -> Exception | None:
        """Return the first of several errors in a row, once; otherwise None."""
        error, self._error = self._error, None
        return error

    def close(self, seconds: float, progress: Callable[[], None]) -> bool:
        """Write a last time, in at most `seconds`, with `progress` every 5 s; return False if time ran out."""
        self._closing.set()
        self._due.set()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(5.0, left))
            if self._thread.is_alive() and time.monotonic() < deadline:
                progress()
        in_time = not self._thread.is_alive()
        self._stopped.set()
        return in_time

    def _work(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            self._due.wait()
            self._due.clear()
            closing, start = self._closing.is_set(), time.monotonic()
            try:
                self._write()
                if closing:
                    return
                failures = 0
                self._closing.wait(min(max(INTERVAL, (time.monotonic() - start) / SHARE), LONGEST))
            except Exception as error:  # noqa: BLE001 - handed to the thread that wakes this one
                if failures == 0:
                    self._error = error
                failures += 1
                pause = self._pauses[min(failures, len(self._pauses)) - 1]
                if self._closing.wait(pause):  # a shorter pause when closing
                    self._stopped.wait(min(pause, self._pauses[0]))
                self._due.set()
