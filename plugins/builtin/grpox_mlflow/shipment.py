"""Updates the MLflow run of a run's folder from that folder, which is the authoritative record.

Writing twice is harmless. This matters because a server may have executed a request without answering. The
store
recognizes each value by its recorded time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpox.errors import ConfigError, redact, redacted
from grpox.toolkit import LOCK_FILE, pluralize, write_atomically
from grpox_mlflow.contents import EVAL_TABLE, SWEEP_TABLE, completions_table, dataset_inputs
from grpox_mlflow.followed import ALARM, ERROR, FollowedRun, tags_of
from grpox_mlflow.naming import KEY_TAG
from grpox_mlflow.recorded import (
    METRICS,
    METRICS_PER_BATCH,
    PARAMS_PER_BATCH,
    SYSTEM,
    RecordedLines,
    in_requests,
    recorded_metrics,
)
from grpox_mlflow.registry import Registration, Registry
from grpox_mlflow.store import is_passing, open_store, page_of, place_of
from grpox_mlflow.traces import recorded_traces, write_traces

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

COMPLETIONS = "completions"
_BATCHES = (COMPLETIONS, "tokens")
"""Folders with a file for each generation batch or step; such a file never changes."""
_FILES = ("config.yaml", LOCK_FILE, "summary.json", "sweep.json", SWEEP_TABLE)
_SHOWING = ("report.html", EVAL_TABLE)
"""Names of files that show completions."""
_LOGGED = "mlflow.loggedArtifacts"
"""Tag of the run that lists the artifacts which are tables."""

Progress = Callable[[int, int], None]
"""Callback that receives the shipped bytes of metrics.jsonl and its total bytes."""


class Shipment:
    """Ships the data of a run that MLflow lacks; after an error the same call continues from the same point.

    Args:
        folder: the run's folder.
        followed: record in the folder.
        uri: address of the store, with the password that `followed` omits.
        live: True while the run continues: an existing MLflow run is then marked RUNNING.
    """

    def __init__(self, folder: Path, followed: FollowedRun, uri: str, live: bool) -> None:
        self.followed = followed
        self.values = self.files = 0
        """Values and files of completions shipped so far."""
        self.more_tags: Mapping[str, str] = {}
        """Tags that cannot be derived from the folder's files."""
        self.ending: tuple[str, int] | None = None
        """MLflow's status of an ended run, and its end in Unix milliseconds."""
        self.is_table_due = False
        """True to write the table of completions before the run has ended."""
        self.recorded = recorded_metrics(folder / METRICS)
        self._folder, self._uri, self._live = folder, uri, live
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._is_old = False
        """True if the MLflow run existed before, and so may have some of the data."""
        self._tags: dict[str, str] = {}
        self._steps: dict[str, set[int]] | None = None
        """Steps of each metric that the MLflow run had when it was opened."""
        self._shipped: dict[str, tuple[int, int]] = {}
        """Shipped files: name -> (size, modification time)."""
        self._all_recorded = {folder / METRICS: self.recorded}
        """Files of metrics: the run's own, and the system metrics of each machine."""
        self._traces = recorded_traces(folder, followed.traces_done)
        registration = followed.registration
        self._registry = Registry(folder, Registration(**registration), followed.key) if registration else None

    def open(self) -> MlflowClient:
        """Find the run in the store, or create it with its original start time and parameters."""
        if self._client is not None:
            return self._client
        client, experiment_id = open_store(self._uri, self.followed.experiment)
        # Imported only after `open_store` has probed the store.
        from mlflow.entities import Param

        run = self._find(client, experiment_id)
        self._is_old = run is not None
        run = run or self._create(client, experiment_id)
        self._run_id, self._tags = run.info.run_id, dict(run.data.tags)
        self._note(experiment_id=run.info.experiment_id, run_id=self._run_id)
        if self._live and run.info.status != "RUNNING":
            client.update_run(self._run_id, status="RUNNING")
        missing = self.followed.params.keys() - run.data.params.keys()
        params = [Param(key, value) for key, value in self.followed.params.items() if key in missing]
        for batch in in_requests(params, PARAMS_PER_BATCH):
            client.log_batch(self._run_id, params=batch, synchronous=True)
        if self.followed.datasets:
            client.log_inputs(self._run_id, dataset_inputs(self.followed.datasets))
        self._client = client
        return client

    def ship(self, progress: Progress | None = None) -> None:
        """Ship all data of the folder that MLflow lacks.

        Raises:
            Exception: any error of the store; data shipped before the error remains.
        """
        client = self.open()
        if self._steps is None:
            self._steps = self._look(client) if self._is_old else {}
        self._ship_metrics(client, self.recorded, progress)
        for path in sorted((self._folder / SYSTEM).glob("*.jsonl")):
            if path not in self._all_recorded:
                self._all_recorded[path] = recorded_metrics(path)
            self._ship_metrics(client, self._all_recorded[path])
        self._make_table()
        self._ship_tags(client)
        if self.ending is not None:
            client.set_terminated(self._run_id, *self.ending)
        # Files come last: a server without space for files still gets all other data.
        self._ship_files(client)
        if self._registry is not None:
            self._registry.write(client, self._run_id, self.followed.experiment_id or "")
        self._ship_traces(client)

    def lacking(self) -> str:
        """Describe what MLflow lacks: ``3 steps``, ``0 steps, 12 traces``."""
        steps, traces = pluralize(self.recorded.left(), "step"), self._traces.left()
        return f"{steps}, {pluralize(traces, 'trace')}" if traces else steps

    def upload_bytes(self) -> int:
        """Return the bytes of models that wait for upload."""
        return 0 if self._registry is None else self._registry.upload_bytes()

    @property
    def status(self) -> str:
        """MLflow's status of the run."""
        return "RUNNING" if self.ending is None else self.ending[0]

    @property
    def place(self) -> str:
        """Address of the run's page; of a store without a server, also the command that serves it."""
        ids = self.followed.experiment_id or "", self.followed.run_id or ""
        page, place = page_of(self._uri, *ids), place_of(self._uri, *ids)
        return page if page == place else f"{page} after {place}"

    def _note(self, **changes: Any) -> None:
        """Record facts about the MLflow run in the run's folder."""
        self.followed = replace(self.followed, **changes)
        self.followed.write(self._folder)

    def _find(self, client: MlflowClient, experiment_id: str) -> Run | None:
        """Find the run; keep the first of several, which a lost answer can cause."""
        from mlflow.exceptions import MlflowException

        key, run_id = self.followed.key, self.followed.run_id
        try:
            run = client.get_run(run_id) if run_id is not None else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is not None and run.data.tags.get(KEY_TAG) == key and run.info.lifecycle_stage == "active":
            return run
        runs = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'")
        first, *doubles = sorted(runs, key=lambda run: str(run.info.run_id)) or [None]
        for double in doubles:
            client.delete_run(double.info.run_id)
        return first

    def _create(self, client: MlflowClient, experiment_id: str) -> Run:
        followed = self.followed
        tags = {**followed.tags, KEY_TAG: followed.key}
        created = client.create_run(experiment_id, followed.start_time, tags, followed.run_name)
        # The traces may be in another store.
        self._traces.position = 0
        self.followed = replace(followed, traces_done=0)
        # An earlier request to create the run may have been executed.
        return self._find(client, experiment_id) or created

    def _look(self, client: MlflowClient) -> dict[str, set[int]]:
        """Record the files that an existing MLflow run has; return the steps of its metrics."""
        there = {
            entry.path: entry.file_size
            for folder in _BATCHES
            for entry in client.list_artifacts(self._run_id, folder)
        }
        for name, path in self._files():
            if name.partition("/")[0] in _BATCHES and there.get(name) == path.stat().st_size:
                self._shipped[name] = _stamp(path)
        names = client.get_run(self._run_id).data.metrics
        return {
            name: {metric.step for metric in client.get_metric_history(self._run_id, name)} for name in names
        }

    def _ship_metrics(
        self, client: MlflowClient, recorded: RecordedLines[Metric], progress: Progress | None = None
    ) -> None:
        there = self._steps or {}
        for values, end in recorded.pieces():
            # A run that resumes from a checkpoint repeats some steps, with the same result.
            missing = [value for value in values if value.step not in there.get(value.key, ())]
            for batch in in_requests(missing, METRICS_PER_BATCH):
                client.log_batch(self._run_id, metrics=batch, synchronous=True)
            self.values += len(missing)
            if progress is not None:
                progress(end, recorded.size)

    def _ship_traces(self, client: MlflowClient) -> None:
        """Ship traces in pieces, and between two pieces the metrics recorded meanwhile."""
        for traces, end in self._traces.pieces():
            followed = self.followed
            write_traces(self._uri, followed.experiment_id or "", self._run_id, followed.key, traces)
            self._note(traces_done=end)
            self._ship_metrics(client, self.recorded)

    def _make_table(self) -> None:
        """Write the table of completions into the run's folder, if it is due or the run has ended."""
        if not self.followed.log_completions or not (self.is_table_due or self.ending is not None):
            return
        self.is_table_due = False
        with suppress(ConfigError, OSError):  # the report describes files that cannot be read
            text = completions_table(self._folder)
            path = self._folder / EVAL_TABLE
            if text is not None and not (path.exists() and path.read_text(encoding="utf-8") == text):
                write_atomically(path, text)

    def _ship_tags(self, client: MlflowClient) -> None:
        names = [name for name, _ in self._files() if name in (EVAL_TABLE, SWEEP_TABLE)]
        tables = {_LOGGED: json.dumps([{"path": name, "type": "table"} for name in names])} if names else {}
        tags = {**self.followed.tags, **tags_of(self._folder), **self.more_tags, **tables}
        for key, value in tags.items():
            if self._tags.get(key) != redact(value):
                client.set_tag(self._run_id, key, redact(value))
                self._tags[key] = redact(value)
        # Of an end, or of alarms, that a resumed run does not have.
        for key in [key for key in self._tags if key == ERROR or key.startswith(ALARM)]:
            if key not in tags:
                client.delete_tag(self._run_id, key)
                del self._tags[key]

    def _ship_files(self, client: MlflowClient) -> None:
        """Ship every file. If one fails, continue with the others and retry it next time.

        If the server does not answer at all, stop: every other file would wait as long.
        """
        failure: Exception | None = None
        for name, path in self._files():
            stamp = _stamp(path)
            if self._shipped.get(name) == stamp:
                continue
            try:
                # Completions are shown unchanged, even if they look like secrets.
                is_config = path.suffix in (".yaml", ".json") and name not in _SHOWING
                masked = _without_secrets(path) if is_config else None
                if masked is None:
                    client.log_artifact(self._run_id, str(path), name.rpartition("/")[0] or None)
                else:
                    client.log_text(self._run_id, masked, name)
            except Exception as error:
                if is_passing(error):
                    raise
                failure = error
            else:
                self._shipped[name] = stamp
                self.files += name.startswith(COMPLETIONS)
        if failure is not None:
            raise failure

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield (name in MLflow, file) of each file that exists."""
        names = list(_FILES)
        if self.followed.log_completions:
            names += _SHOWING
            for folder in _BATCHES:
                written = (self._folder / folder).glob("step_*.parquet")
                names += sorted(f"{folder}/{path.name}" for path in written)
        yield from ((name, self._folder / name) for name in names if (self._folder / name).exists())


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _without_secrets(path: Path) -> str | None:
    """Return the text of a YAML or JSON file with its secrets masked; None where it has none."""
    text, is_json = path.read_text(encoding="utf-8"), path.suffix == ".json"
    content = json.loads(text) if is_json else yaml.safe_load(text)
    masked = redacted(content)
    if masked == content:
        return None
    if is_json:
        return json.dumps(masked, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(masked, sort_keys=False, allow_unicode=True, width=110))
