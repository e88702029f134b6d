"""Updates the MLflow run of a run's folder from that folder, which is the authoritative record.

Writing twice is harmless. This matters because a server may have executed a request without answering. The
store recognizes each value by its recorded time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.errors import ConfigError, redact
from grpox.toolkit import LOCK_FILE, pluralize, write_atomically
from grpox_mlflow.contents import EVAL_TABLE, SWEEP_TABLE, completions_table, dataset_inputs
from grpox_mlflow.lines import (
    METRICS,
    METRICS_PER_BATCH,
    PARAMS_PER_BATCH,
    SYSTEM,
    RecordedLines,
    in_requests,
    recorded_metrics,
)
from grpox_mlflow.link import ALARM, ERROR, RunLink, tags_of
from grpox_mlflow.naming import KEY_TAG
from grpox_mlflow.registry import ModelRegistry
from grpox_mlflow.store import addresses, is_passing, open_store
from grpox_mlflow.traces import recorded_traces, write_traces

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_BATCHES = ("completions", "tokens")
"""Folders with a file for each generation batch or step; such a file never changes."""
_FILES = ("config.yaml", LOCK_FILE, "summary.json", "sweep.json", SWEEP_TABLE)
_LOGGED = "mlflow.loggedArtifacts"
"""Tag of the run that lists the artifacts which are tables."""

Progress = Callable[[int, int], None]
"""Callback that receives the shipped bytes of metrics.jsonl and its total bytes."""


class Shipment:
    """Ships the data of a run that MLflow lacks; after an error the same call continues from the same point.

    Args:
        folder: the run's folder.
        link: record in the folder.
        uri: address of the store, with the password that `link` omits.
        live: True while the run continues: an existing MLflow run is then marked RUNNING.
    """

    def __init__(self, folder: Path, link: RunLink, uri: str, live: bool) -> None:
        self.link = link
        self.values = self.files = 0
        """Values and files of completions shipped so far."""
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
        self._of_machines: dict[Path, RecordedLines[Metric]] = {}
        """Files with the system metrics of each machine."""
        self._traces = recorded_traces(folder, link.traces_done)
        self._registry = ModelRegistry(folder, link.key, **link.registration) if link.registration else None

    def open(self) -> MlflowClient:
        """Find the run in the store, or create it with its original start time and parameters."""
        if self._client is not None:
            return self._client
        client, experiment_id = open_store(self._uri, self.link.experiment)
        # Imported only after `open_store` has probed the store.
        from mlflow.entities import Param

        run = self._find(client, experiment_id)
        self._is_old = run is not None
        if run is None:
            tags = {**self.link.tags, KEY_TAG: self.link.key}
            created = client.create_run(experiment_id, self.link.start_time, tags, self.link.run_name)
            # The traces may be in another store.
            self._traces.position = 0
            self.link = replace(self.link, traces_done=0)
            # An earlier request to create the run may have been executed.
            run = self._find(client, experiment_id) or created
        self._run_id, self._tags = run.info.run_id, dict(run.data.tags)
        self.note(experiment_id=run.info.experiment_id, run_id=self._run_id)
        if self._live and run.info.status != "RUNNING":
            client.update_run(self._run_id, status="RUNNING")
        missing = self.link.params.keys() - run.data.params.keys()
        params = [Param(key, value) for key, value in self.link.params.items() if key in missing]
        for batch in in_requests(params, PARAMS_PER_BATCH):
            client.log_batch(self._run_id, params=batch, synchronous=True)
        if self.link.datasets:
            client.log_inputs(self._run_id, dataset_inputs(self.link.datasets))
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
            if path not in self._of_machines:
                self._of_machines[path] = recorded_metrics(path)
            self._ship_metrics(client, self._of_machines[path])
        self._make_table()
        self._ship_tags(client)
        if self.ending is not None:
            client.set_terminated(self._run_id, *self.ending)
        # Files come last: a server without space for files still gets all other data.
        self._ship_files(client)
        if self._registry is not None:
            self._registry.write(client, self._run_id, self.link.experiment_id or "")
        # In pieces, and between two pieces the metrics recorded meanwhile.
        for traces, end in self._traces.pieces():
            write_traces(self._uri, self.link.experiment_id or "", self._run_id, self.link.key, traces)
            self.note(traces_done=end)
            self._ship_metrics(client, self.recorded)

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
        shown = addresses(self._uri, self.link.experiment_id or "", self.link.run_id or "")
        return " after ".join(reversed(shown.values()))

    def note(self, **changes: Any) -> None:
        """Record facts about the MLflow run in the run's folder."""
        self.link = replace(self.link, **changes)
        self.link.write(self._folder)

    def _find(self, client: MlflowClient, experiment_id: str) -> Run | None:
        """Find the run; keep the first of several, which a lost answer can cause."""
        from mlflow.exceptions import MlflowException

        key, run_id = self.link.key, self.link.run_id
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

    def _look(self, client: MlflowClient) -> dict[str, set[int]]:
        """Record the files that an existing MLflow run has; return the steps of its metrics."""
        listed = (entry for folder in _BATCHES for entry in client.list_artifacts(self._run_id, folder))
        there = {entry.path: entry.file_size for entry in listed}
        self._shipped = {
            name: stamp for name, _, stamp in self._files() if name in there and there[name] == stamp[0]
        }
        names = client.get_run(self._run_id).data.metrics
        return {name: {each.step for each in client.get_metric_history(self._run_id, name)} for name in names}

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

    def _make_table(self) -> None:
        """Write the table of completions into the run's folder, if it is due or the run has ended."""
        if not self.link.log_completions or not (self.is_table_due or self.ending is not None):
            return
        self.is_table_due = False
        with suppress(ConfigError, OSError):  # the report describes files that cannot be read
            text = completions_table(self._folder)
            path = self._folder / EVAL_TABLE
            if text is not None and not (path.exists() and path.read_text(encoding="utf-8") == text):
                write_atomically(path, text)

    def _ship_tags(self, client: MlflowClient) -> None:
        tables = [{"path": name, "type": "table"} for name, *_ in self._files() if name.endswith("_table.json")]
        tags = {**self.link.tags, **tags_of(self._folder)}
        tags |= {_LOGGED: json.dumps(tables)} if tables else {}
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
        for name, path, stamp in self._files():
            if self._shipped.get(name) == stamp:
                continue
            try:
                client.log_artifact(self._run_id, str(path), name.rpartition("/")[0] or None)
            except Exception as error:
                if is_passing(error):
                    raise
                failure = error
            else:
                self._shipped[name] = stamp
                self.files += name.startswith("completions/")
        if failure is not None:
            raise failure

    def _files(self) -> Iterator[tuple[str, Path, tuple[int, int]]]:
        """Yield (name in MLflow, file, (size, modification time)) of each file that exists."""
        names = list(_FILES)
        if self.link.log_completions:
            names += ["report.html", EVAL_TABLE]
            for folder in _BATCHES:
                written = (self._folder / folder).glob("step_*.parquet")
                names += sorted(f"{folder}/{path.name}" for path in written)
        for name in names:
            path = self._folder / name
            if path.exists():
                yield name, path, (path.stat().st_size, path.stat().st_mtime_ns)
