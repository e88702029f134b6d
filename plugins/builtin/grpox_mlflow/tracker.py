"""Follows a run into MLflow; what takes time is written by a background thread.

Opening the store takes 2 s (5 s for a new SQLite file) and holds the interpreter's lock for nearly all of it,
so that doing it beside the model's loading would gain nothing: it is done at once, and a store that cannot be
used ends the run before it begins. Afterwards a step only queues its writes.
"""

from __future__ import annotations

import getpass
import shlex
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from grpox.errors import RunFailed
from grpox.hookspecs import hookimpl
from grpox.observing.completions import CompletionFiles
from grpox.observing.record import config_text
from grpox_mlflow.naming import Names, flattened, shortened
from grpox_mlflow.store import open_store, quick_requests, resolved_uri, sqlite_path, without_password
from grpox_mlflow.writer import Writer

if TYPE_CHECKING:
    from grpox.contracts import RunContext
    from grpox_mlflow.configs import MlflowConfig

CLOSE_SECONDS = 60.0
"""How long the end of a run waits for what is not written yet."""
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000
_TAG_LENGTH = 5000


class MlflowTracker:
    """Parameters, metrics, completions, checkpoints and the final status of a run, in MLflow.

    Every write names its run: nothing depends on, or changes, MLflow's own idea of the active run. An error
    of the background writer is raised by the next hook call.
    """

    def __init__(self, config: MlflowConfig, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console()
        self._writer: Writer | None = None
        self._metric_names = Names()

    @hookimpl
    def grpox_run_started(self, run: RunContext) -> None:
        """Raises RunFailed when the store cannot be used."""
        from mlflow.entities import Param

        self._uri = resolved_uri(self._config.tracking_uri)
        self._client, self._experiment_id = open_store(self._uri, self._config.experiment)
        self._files = CompletionFiles(run)
        self._report = run.output_dir / "report.html"
        names = Names()
        params = [Param(names[key], shortened(value)) for key, value in _params(run)]
        with quick_requests():
            created = self._client.create_run(
                self._experiment_id, tags=self._tags(run), run_name=self._config.run_name
            )
            self._run_id: str = created.info.run_id
            # From here on the run exists, and its end must be written whatever happens.
            self._writer = Writer(_is_passing)
            for start in range(0, len(params), _PARAMS_PER_BATCH):
                self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_BATCH])
        self._submit(partial(self._client.log_text, self._run_id, config_text(run.config), "config.yaml"))

    @hookimpl
    def grpox_rollouts_scored(self, step: int) -> None:
        # Asked even when nothing is uploaded: it counts generation batches.
        path = self._files.next(step)
        if path is not None and self._config.log_completions:
            self._submit(partial(self._client.log_artifact, self._run_id, str(path), "completions"))

    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, metrics)

    @hookimpl
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {f"evaluation/{name.removeprefix('evaluation/')}": metrics[name] for name in metrics})

    @hookimpl
    def grpox_checkpoint_saved(self, path: Path) -> None:
        self._submit(partial(self._client.set_tag, self._run_id, "grpox.checkpoint", str(path)[:_TAG_LENGTH]))

    @hookimpl
    def grpox_run_failed(self, error: BaseException) -> None:
        if self._writer is None:
            return
        killed = not isinstance(error, Exception)  # Ctrl-C, SIGTERM, SystemExit
        told = f"{type(error).__name__}: {error}"[:_TAG_LENGTH]
        self._submit(partial(self._client.set_tag, self._run_id, "grpox.error", told), check=False)
        self._submit_report()
        self._close(self._writer, "KILLED" if killed else "FAILED")

    @hookimpl
    def grpox_run_finished(self, run: RunContext) -> None:
        if self._writer is None:
            return
        summary = str(run.output_dir / "summary.json")
        self._submit(partial(self._client.log_artifact, self._run_id, summary), check=False)
        self._submit_report()
        self._close(self._writer, "FINISHED")

    def _tags(self, run: RunContext) -> dict[str, str]:
        from mlflow.utils import mlflow_tags

        names = Names()
        tags = {names[f"version.{name}"]: version for name, version in run.versions.items()}
        tags |= {
            "grpox.version": run.versions.get("grpox", "unknown"),
            "grpox.output_dir": str(run.output_dir.absolute()),
            mlflow_tags.MLFLOW_SOURCE_NAME: run.source,
            mlflow_tags.MLFLOW_SOURCE_TYPE: "LOCAL",
            mlflow_tags.MLFLOW_USER: _user(),
        }
        if run.git_commit is not None:
            tags |= {"grpox.git.commit": run.git_commit, mlflow_tags.MLFLOW_GIT_COMMIT: run.git_commit}
        return {key: value[:_TAG_LENGTH] for key, value in (tags | self._config.tags).items()}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        logged = [Metric(self._metric_names[name], float(metrics[name]), now, step) for name in metrics]
        for start in range(0, len(logged), _METRICS_PER_BATCH):
            batch = logged[start : start + _METRICS_PER_BATCH]
            self._submit(partial(self._client.log_batch, self._run_id, metrics=batch))

    def _submit(self, write: Any, check: bool = True) -> None:
        if self._writer is None:
            raise RunFailed("the MLflow run was never started, or has ended")
        self._writer.submit(write)
        if check:
            self._raise_error(self._writer)

    def _submit_report(self) -> None:
        # The report shows completions; a run that failed early has none.
        if self._config.log_completions and self._report.exists():
            self._submit(partial(self._client.log_artifact, self._run_id, str(self._report)), check=False)

    def _raise_error(self, writer: Writer) -> None:
        error = writer.take_error()
        if error is not None:
            raise RunFailed(
                f"MLflow at {without_password(self._uri)}: {error}\n"
                f"    {writer.waiting} writes wait, {writer.lost} were given up; the run's folder has it all"
            ) from error

    def _close(self, writer: Writer, status: str) -> None:
        """Write what waits and the final status, and tell where the run is; raises what went wrong."""
        self._writer = None
        last = partial(self._client.set_terminated, self._run_id, status)
        with quick_requests():
            in_time = writer.close(CLOSE_SECONDS, last, self._tell_progress)
        self._tell(f"MLflow run {self._run_id} ({status}): {self._place()}")
        self._raise_error(writer)
        if not in_time:
            raise RunFailed(
                f"MLflow did not take {writer.lost} writes in {CLOSE_SECONDS:.0f} s, status included"
            )

    def _place(self) -> str:
        """The run's page on a server, or the command that shows the store, as a shell takes it."""
        uri = without_password(self._uri)
        if uri.startswith(("http://", "https://")):
            return f"{uri.rstrip('/')}/#/experiments/{self._experiment_id}/runs/{self._run_id}"
        path = sqlite_path(self._uri)
        if path is not None and path.is_relative_to(Path.cwd()):
            uri = f"sqlite:///{path.relative_to(Path.cwd())}"
        return uri if uri.startswith("databricks") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"

    def _tell_progress(self, waiting: int) -> None:
        self._tell(f"MLflow: {waiting} writes to go (waiting at most {CLOSE_SECONDS:.0f} s)")

    def _tell(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _params(run: RunContext) -> list[tuple[str, str]]:
    dumped = run.config.model_dump(mode="json")
    run_itself = {"world_size": run.world_size, "total_steps": run.total_steps}
    return list(flattened({**dumped, "run": run_itself}))


def _is_passing(error: Exception) -> bool:
    """Whether a write may succeed later: no answer, a server in trouble, a locked database."""
    from mlflow.exceptions import MlflowException

    passing = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"}
    return isinstance(error, MlflowException) and error.error_code in passing


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id that has no name.
        return "unknown"
