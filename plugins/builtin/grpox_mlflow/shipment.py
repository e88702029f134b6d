"""Brings the MLflow run of a run's folder up to date with the folder, which is the truth.

All that it writes can be written twice without harm, because nobody knows what a server has done with a request
that it did not answer: a value goes with the time at which it was recorded, and the store knows it by that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from grpox.errors import ConfigError, redact, redacted
from grpox.toolkit import LOCK_FILE, counted, write_whole
from grpox_mlflow.datasets import dataset_inputs
from grpox_mlflow.followed import ERROR, FollowedRun, tags_of
from grpox_mlflow.recorded import PARAMS_PER_BATCH, SYSTEM, RecordedMetrics, in_requests
from grpox_mlflow.registry import KEY, Registration, Registry
from grpox_mlflow.store import is_passing, open_store
from grpox_mlflow.table import EVALUATION, SWEEP, completions_table, logged_tag
from grpox_mlflow.traces import RecordedTraces, write_traces

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

METRICS_PER_BATCH = 1000
"""MLflow's limit for one request."""
CONFIG, COMPLETIONS = "config.yaml", "completions"
_FILES = (CONFIG, LOCK_FILE, "summary.json", "sweep.json", SWEEP)
_SHOWING = ("report.html", EVALUATION)
"""Files that show completions."""

Progress = Callable[[int, int], None]
"""Told how many bytes of metrics.jsonl are done with, and how many there are."""


class Shipment:
    """Ships what MLflow lacks of a run; the same call continues after any error, where that one came.

    Args:
        folder: the run's.
        followed: as in the folder.
        uri: of the store, with the password that `followed` does not hold.
        live: the run is going on, so that one which is found is marked RUNNING.
    """

    def __init__(self, folder: Path, followed: FollowedRun, uri: str, live: bool) -> None:
        self.followed = followed
        self.values = self.files = 0
        """Values and files of completions shipped so far."""
        self.more_tags: Mapping[str, str] = {}
        """Tags that do not follow from the folder's files."""
        self.ending: tuple[str, int] | None = None
        """How the run ended, and when (unix milliseconds), once it has."""
        self.recorded = RecordedMetrics(folder)
        self._folder = folder
        self._uri = uri
        self._live = live
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._found = False
        """Whether the run was there, so that it may have some of what is to be shipped."""
        self._params: set[str] = set()
        self._tags: dict[str, str] = {}
        self._steps: dict[str, set[int]] | None = None
        """Steps of each metric that were there when the run was found."""
        self._shipped: dict[str, tuple[int, int]] = {}
        """Files as they were shipped: name -> (size, time of change)."""
        self._system: dict[str, RecordedMetrics] = {}
        """What each machine recorded of itself, by the file's name."""
        self._traces = RecordedTraces(folder, followed.traces_done)
        told = followed.registration
        self._registry = Registry(folder, Registration(**told), followed.key) if told is not None else None
        self._inputs_told = False
        self.table_due = False
        """Whether to make the table of completions before the run is over."""

    def open(self) -> MlflowClient:
        """Find the run in the store, or create it as it was when it started; its parameters are there then."""
        if self._client is None:
            client, experiment_id = open_store(self._uri, self.followed.experiment)
            run = self._find(client, experiment_id) or self._create(client, experiment_id)
            self._run_id = run.info.run_id
            self._params, self._tags = set(run.data.params), dict(run.data.tags)
            self.followed = replace(self.followed, experiment_id=run.info.experiment_id, run_id=self._run_id)
            self.followed.write(self._folder)
            if self._live and run.info.status != "RUNNING":
                client.update_run(self._run_id, status="RUNNING")
            self._client = client
        self._ship_params(self._client)
        self._ship_inputs(self._client)
        return self._client

    def ship(self, progress: Progress | None = None) -> None:
        """Ship all that the folder has and MLflow lacks.

        Raises:
            Exception: whatever keeps it from that; what was shipped before it stays so.
        """
        client = self.open()
        if self._steps is None:
            self._look(client)
        self._ship_metrics(client, self.recorded, progress)
        self._ship_system(client)
        self._make_table()
        self._ship_tags(client)
        if self.ending is not None:
            client.set_terminated(self._run_id, *self.ending)
        # Last: a server that has no room for files is still told everything else.
        self._ship_files(client)
        if self._registry is not None:
            self._registry.write(client, self._run_id, self.followed.experiment_id or "")
        self._ship_traces(client)

    def lacking(self) -> str:
        """What MLflow lacks: ``3 steps``, ``0 steps, 12 traces``."""
        told = counted(self.recorded.left(), "step")
        traces = self._traces.left()
        return f"{told}, {counted(traces, 'trace')}" if traces else told

    def upload_bytes(self) -> int:
        """Bytes of models that are to be uploaded."""
        return 0 if self._registry is None else self._registry.upload_bytes()

    def _find(self, client: MlflowClient, experiment_id: str) -> Run | None:
        """The run, if it is there; of several, which an answer that came too late may leave, the first."""
        known = self._known(client)
        if known is None:
            found = client.search_runs([experiment_id], f"tags.`{KEY}` = '{self.followed.key}'")
            known, *doubles = sorted(found, key=lambda run: str(run.info.run_id)) or [None]
            for double in doubles:
                client.delete_run(double.info.run_id)
        self._found = known is not None
        return known

    def _known(self, client: MlflowClient) -> Run | None:
        from mlflow.exceptions import MlflowException

        if self.followed.run_id is None:
            return None
        try:
            run = client.get_run(self.followed.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        same = run.data.tags.get(KEY) == self.followed.key
        return run if same and run.info.lifecycle_stage == "active" else None

    def _create(self, client: MlflowClient, experiment_id: str) -> Run:
        followed = self.followed
        tags = {**followed.tags, KEY: followed.key}
        created = client.create_run(experiment_id, followed.start_time, tags, followed.run_name)
        # An earlier request to create it may have been carried out after all.
        run = self._find(client, experiment_id) or created
        self._found = False
        # Another store may have had them.
        self._traces.position = 0
        self.followed = replace(self.followed, traces_done=0)
        return run

    def _look(self, client: MlflowClient) -> None:
        """What a run that was found has already."""
        if self._found:
            run = client.get_run(self._run_id)
            steps = {
                name: {metric.step for metric in client.get_metric_history(self._run_id, name)}
                for name in run.data.metrics
            }
            there = {entry.path: entry.file_size for entry in client.list_artifacts(self._run_id, COMPLETIONS)}
            for name, path in self._files():
                # Only completions are never written twice with another content.
                if name.startswith(COMPLETIONS) and there.get(name) == path.stat().st_size:
                    self._shipped[name] = _stamp(path)
            self._steps = steps
        else:
            self._steps = {}

    def _ship_params(self, client: MlflowClient) -> None:
        from mlflow.entities import Param

        missing = [Param(key, value) for key, value in self.followed.params.items() if key not in self._params]
        for batch in in_requests(missing, PARAMS_PER_BATCH):
            client.log_batch(self._run_id, params=batch, synchronous=True)
            self._params |= {param.key for param in batch}

    def _ship_inputs(self, client: MlflowClient) -> None:
        """Once: the store knows those that it has."""
        if self.followed.datasets and not self._inputs_told:
            client.log_inputs(self._run_id, dataset_inputs(self.followed.datasets))
            self._inputs_told = True

    def _ship_metrics(
        self, client: MlflowClient, recorded: RecordedMetrics, progress: Progress | None = None
    ) -> None:
        there = self._steps or {}
        while True:
            values, end = recorded.next(METRICS_PER_BATCH)
            if end == recorded.position:
                return
            # A run that went back to a checkpoint computes some steps a second time, with the same result.
            missing = [value for value in values if value.step not in there.get(value.key, ())]
            for batch in in_requests(missing, METRICS_PER_BATCH):
                client.log_batch(self._run_id, metrics=batch, synchronous=True)
            recorded.position = end
            self.values += len(missing)
            if progress is not None:
                progress(end, recorded.size)

    def _ship_system(self, client: MlflowClient) -> None:
        for path in sorted((self._folder / SYSTEM).glob("*.jsonl")):
            name = f"{SYSTEM}/{path.name}"
            if name not in self._system:
                self._system[name] = RecordedMetrics(self._folder, name)
            self._ship_metrics(client, self._system[name])

    def _ship_traces(self, client: MlflowClient) -> None:
        """A piece at a time, and between two pieces what has been recorded meanwhile."""
        while True:
            traced, end = self._traces.next()
            if end == self._traces.position:
                return
            followed = self.followed
            write_traces(self._uri, followed.experiment_id or "", self._run_id, followed.key, traced)
            self._traces.position = end
            self.followed = replace(followed, traces_done=end)
            self.followed.write(self._folder)
            self._ship_metrics(client, self.recorded)

    def _make_table(self) -> None:
        """The table of completions, in the run's folder, when it is over or asked for."""
        if not self.followed.log_completions or not (self.table_due or self.ending is not None):
            return
        self.table_due = False
        with suppress(ConfigError, OSError):  # the report tells of files that cannot be read
            text = completions_table(self._folder)
            path = self._folder / EVALUATION
            if text is not None and not (path.exists() and path.read_text(encoding="utf-8") == text):
                write_whole(path, text)

    def _ship_tags(self, client: MlflowClient) -> None:
        tables = logged_tag(name for name, _ in self._files())
        tags = {**self.followed.tags, **tags_of(self._folder), **self.more_tags, **tables}
        for key, value in tags.items():
            if self._tags.get(key) != redact(value):
                client.set_tag(self._run_id, key, redact(value))
                self._tags[key] = redact(value)
        if ERROR in self._tags and ERROR not in tags:
            client.delete_tag(self._run_id, ERROR)
            del self._tags[ERROR]

    def _ship_files(self, client: MlflowClient) -> None:
        """One that cannot be shipped is tried again the next time, and keeps no other from it.

        Unless nobody answers: then each of them would take as long to find that out.
        """
        failure: Exception | None = None
        for name, path in self._files():
            stamp = _stamp(path)
            if self._shipped.get(name) == stamp:
                continue
            try:
                self._ship_file(client, name, path)
            except Exception as error:
                if is_passing(error):
                    raise
                failure = error
                continue
            self._shipped[name] = stamp
            self.files += name.startswith(COMPLETIONS)
        if failure is not None:
            raise failure

    def _ship_file(self, client: MlflowClient, name: str, path: Path) -> None:
        folder = name.rpartition("/")[0] or None
        # Completions are shown as they are, whatever they look like.
        is_config = path.suffix in (".yaml", ".json") and name not in _SHOWING
        shown = _without_secrets(path) if is_config else None
        if shown is None:
            client.log_artifact(self._run_id, str(path), folder)
        else:
            client.log_text(self._run_id, shown, name)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """(name in MLflow, file) of each that is there."""
        names = list(_FILES)
        if self.followed.log_completions:
            names += _SHOWING
            written = (self._folder / COMPLETIONS).glob("step_*.parquet")
            names += sorted(f"{COMPLETIONS}/{path.name}" for path in written)
        yield from ((name, self._folder / name) for name in names if (self._folder / name).exists())


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _without_secrets(path: Path) -> str | None:
    """The text of a YAML or JSON file without the secrets that it holds; None where it holds none."""
    text = path.read_text(encoding="utf-8")
    held = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    shown = redacted(held)
    if shown == held:
        return None
    if path.suffix == ".json":
        return json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=110))
