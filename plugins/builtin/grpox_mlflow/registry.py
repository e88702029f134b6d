"""The run's model and checkpoints as versions of a registered model, with the metrics that they had.

All of it follows from the files of the run's folder, and what the registry has is found by the run's key: so it
can be done again after any error, and by `grpox sync`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.toolkit import amount, checkpoints_in, step_of
from grpox_mlflow.model_files import (
    CARD,
    MLMODEL,
    REQUIREMENTS,
    TOKENIZER,
    WEIGHTS,
    mlmodel,
    requirements,
    size_of,
    tokenizer_files,
)
from grpox_mlflow.recorded import RecordedMetrics

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric
    from mlflow.entities.model_registry import ModelVersion

GIB = 2**30
BEST = "best"
"""The alias of the best version. MLflow itself gives ``latest`` to the newest one."""
KEY, STEP, FOLDER, METRIC, VALUE = "grpox.run", "grpox.step", "grpox.folder", "grpox.metric", "grpox.value"
UPLOADED, MODEL = "grpox.uploaded", "grpox.model_id"
VERSIONS = "mlflow.modelVersions"
"""The tag by which MLflow's pages lead from a run's model to its version."""
_LINKED = ("evaluation/", "reward", "rewards/")
"""How the names of metrics begin that are linked to a model."""


@dataclass(frozen=True)
class Registration:
    """What `register` and its like say; kept in ``mlflow.json``."""

    name: str
    """Of the registered model."""
    upload_gib: float
    """Up to which a model's files are uploaded."""
    metric: str
    """By which versions are compared."""
    lowest: bool
    versions: Mapping[str, str]
    """Of libraries."""


@dataclass(frozen=True)
class Saved:
    """A model on disk."""

    step: int
    folder: Path
    loadable: bool
    """A Hugging Face folder; else a checkpoint, which is never uploaded: it holds the optimizer's states."""


class Registry:
    """Brings a registered model up to date with a run's folder.

    Args:
        key: of the run, wherever it is kept.
    """

    def __init__(self, folder: Path, registration: Registration, key: str) -> None:
        # By the whole path versions are known again, wherever the process stands.
        self._folder = folder.absolute()
        self._registration = registration
        self._key = key
        self._done: set[Path] = set()

    def upload_bytes(self) -> int:
        """Bytes that are still to be uploaded."""
        return sum(size_of(s.folder) for s in self._saved() if s.folder not in self._done and self._uploads(s))

    def write(self, client: MlflowClient, run_id: str, experiment_id: str) -> None:
        """Register what is saved and not registered, and forget versions whose checkpoint is gone."""
        saved = list(self._saved())
        if {each.folder for each in saved} == self._done:
            return
        self._make_model(client)
        versions = self._versions(client)
        for each in saved:
            if str(each.folder) not in versions:
                self._register_if_there(client, each, run_id, experiment_id)
        there = {str(each.folder) for each in saved}
        for path, version in versions.items():
            # Only now, when the newest is there: MLflow would give its number to the next one.
            if path not in there and not Path(path).exists():
                client.delete_model_version(self._registration.name, version.version)
        self._name_best(client)
        self._done = {each.folder for each in saved}

    def _saved(self) -> Iterator[Saved]:
        """Checkpoints from the first to the last, then the trained model."""
        for folder in reversed(checkpoints_in(self._folder)):
            yield Saved(step_of(folder), folder, loadable=False)
        try:
            summary = json.loads((self._folder / "summary.json").read_text(encoding="utf-8"))
            yield Saved(int(summary["steps"]), self._folder / "model", loadable=True)
        except (OSError, ValueError, KeyError, TypeError):
            return  # not trained to its end

    def _uploads(self, saved: Saved) -> bool:
        return saved.loadable and size_of(saved.folder) <= self._registration.upload_gib * GIB

    def _make_model(self, client: MlflowClient) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client.create_registered_model(self._registration.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _versions(self, client: MlflowClient) -> dict[str, ModelVersion]:
        """Folder -> the version that is of it, of those of this run."""
        found = client.search_model_versions(f"name = '{self._registration.name}'", max_results=1000)
        return {v.tags[FOLDER]: v for v in found if v.tags.get(KEY) == self._key and FOLDER in v.tags}

    def _register_if_there(self, client: MlflowClient, saved: Saved, run_id: str, experiment_id: str) -> None:
        try:
            self._register(client, saved, run_id, experiment_id)
        except FileNotFoundError:
            # The run removes checkpoints of which it has enough, while this thread reads them.
            if saved.folder.exists():
                raise

    def _register(self, client: MlflowClient, saved: Saved, run_id: str, experiment_id: str) -> None:
        model = self._logged_model(client, saved, run_id, experiment_id)
        metrics = list(self._metrics(saved.step))
        tags = {KEY: self._key, STEP: str(saved.step), FOLDER: str(saved.folder), MODEL: model.model_id}
        tags[UPLOADED] = str(self._uploads(saved)).lower()
        value = next((m.value for m in metrics if m.key == self._registration.metric), math.nan)
        if math.isfinite(value):
            tags |= {METRIC: self._registration.metric, VALUE: repr(value)}
        version = client.create_model_version(
            self._registration.name,
            model.artifact_location,
            run_id,
            tags=tags,
            description=self._description(saved),
            await_creation_for=0,  # it is there when this returns, and MLflow would say that it waits
            model_id=model.model_id,
        )
        # A server does this by itself, a database does not.
        told = json.dumps([{"name": version.name, "version": int(version.version)}])
        client.set_logged_model_tags(model.model_id, {VERSIONS: told})

    def _logged_model(self, client: MlflowClient, saved: Saved, run_id: str, experiment_id: str) -> LoggedModel:
        """The model as MLflow's runs show it, with files and metrics; what an earlier try left is taken up."""
        from mlflow.entities import LoggedModelOutput

        of_run = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1000)
        model = next((each for each in of_run if each.tags.get(FOLDER) == str(saved.folder)), None)
        if model is None:
            name = self._registration.name.replace(".", "-")
            tags = {KEY: self._key, STEP: str(saved.step), FOLDER: str(saved.folder)}
            model = client.create_logged_model(experiment_id, name, run_id, tags, model_type="text-generation")
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, saved.step)])
        if model.status != "READY":
            self._write_files(client, saved, model.model_id, run_id)
            self._link_metrics(client, saved.step, model.model_id, run_id)
            client.finalize_logged_model(model.model_id, "READY")
        return model

    def _write_files(self, client: MlflowClient, saved: Saved, model_id: str, run_id: str) -> None:
        uploads, versions = self._uploads(saved), self._registration.versions
        saved_at = saved.folder.stat().st_mtime
        with tempfile.TemporaryDirectory() as folder:
            small = Path(folder)
            text = mlmodel(saved.folder, uploads, versions, model_id, run_id, saved_at, saved.loadable)
            (small / MLMODEL).write_text(text, encoding="utf-8")
            (small / REQUIREMENTS).write_text(requirements(versions), encoding="utf-8")
            if (saved.folder / CARD).exists():
                (small / CARD).write_bytes((saved.folder / CARD).read_bytes())
            client.log_model_artifacts(model_id, folder)
        if saved.loadable:
            for path in tokenizer_files(saved.folder):
                client.log_model_artifact(model_id, str(path), TOKENIZER)
        if uploads:
            client.log_model_artifacts(model_id, str(saved.folder), WEIGHTS)

    def _link_metrics(self, client: MlflowClient, step: int, model_id: str, run_id: str) -> None:
        from mlflow.entities import Metric

        linked = [
            Metric(m.key, m.value, m.timestamp, m.step, model_id=model_id, run_id=run_id)
            for m in self._metrics(step)
            if m.key.startswith(_LINKED) and math.isfinite(m.value)
        ]
        for start in range(0, len(linked), 500):
            client.log_batch(run_id, metrics=linked[start : start + 500], synchronous=True)

    def _metrics(self, step: int) -> Iterator[Metric]:
        """What was recorded of the policy after `step` steps; of what was recorded twice the last."""
        recorded, last = RecordedMetrics(self._folder), dict[str, Any]()
        while True:
            values, end = recorded.next(10_000)
            if end == recorded.position:
                break
            last |= {value.key: value for value in values if value.step == step}
            recorded.position = end
        yield from last.values()

    def _description(self, saved: Saved) -> str:
        if not saved.loadable:
            return (
                f"Checkpoint after step {saved.step}, in {saved.folder}. As a Hugging Face folder: "
                f"`grpox export {saved.folder} OUT_DIR`"
            )
        where = (
            "" if self._uploads(saved) else f" Its weights ({amount(size_of(saved.folder))}) were not uploaded."
        )
        return f"The model after step {saved.step}, in {saved.folder}.{where}"

    def _name_best(self, client: MlflowClient) -> None:
        """Give the alias to the best of this run's versions, unless the one that has it is better."""
        name, metric = self._registration.name, self._registration.metric
        mine = [v for v in self._versions(client).values() if v.tags.get(METRIC) == metric and VALUE in v.tags]
        if not mine:
            return
        best = max(mine, key=self._rank)
        holder = self._holder(client)
        if holder is None or holder.tags.get(METRIC) != metric or self._rank(best) > self._rank(holder):
            client.set_registered_model_alias(name, BEST, best.version)

    def _holder(self, client: MlflowClient) -> ModelVersion | None:
        held = client.get_registered_model(self._registration.name).aliases.get(BEST)
        return None if held is None else client.get_model_version(self._registration.name, held)

    def _rank(self, version: ModelVersion) -> tuple[float, int]:
        """By value; of equals the later version, which of a run is its trained model."""
        value = float(version.tags[VALUE])
        return (-value if self._registration.lowest else value), int(version.version)
