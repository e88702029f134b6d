"""The run's model and checkpoints as versions of a registered model, with their metrics.

All data comes from the files of the run's folder, and the registry's entries have the run's key. So writing can
be repeated after any error, also by `grpox sync`. A version's files have the layout of MLflow's transformers
flavor, so that `mlflow.transformers.load_model` reads them. MLflow's own writer would load and save the model.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpox.toolkit import checkpoints_in, format_bytes, read_mapping, step_of
from grpox_mlflow.lines import METRICS, in_requests, recorded_metrics
from grpox_mlflow.naming import KEY_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric
    from mlflow.entities.model_registry import ModelVersion

GIB = 2**30
BEST = "best"
"""Alias of the best version; MLflow itself gives ``latest`` to the newest version."""
STEP, FOLDER, METRIC, VALUE = "grpox.step", "grpox.folder", "grpox.metric", "grpox.value"
UPLOADED, MODEL = "grpox.uploaded", "grpox.model_id"
VERSIONS = "mlflow.modelVersions"
"""Tag by which MLflow's pages link a run's model to its version."""
CARD = "README.md"
WEIGHTS = "model"
"""Folder of the weights in an MLflow model."""
SIGNATURE = {
    "inputs": json.dumps([{"type": "string", "name": "prompt", "required": True}]),
    "outputs": json.dumps([{"type": "string", "name": "completion", "required": True}]),
    "params": None,
}
"""Signature of the model: the input is a prompt, the output a completion, both as text."""
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")
_LINKED = ("evaluation/", "reward", "rewards/")
"""Prefixes of the names of metrics that are linked to a model."""


@dataclass(frozen=True)
class Saved:
    """A model on disk."""

    step: int
    folder: Path
    loadable: bool
    """True for a Hugging Face folder; a checkpoint is never uploaded, because it contains optimizer states."""

    @property
    def size(self) -> int:
        """Size of all its files in bytes."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


class ModelRegistry:
    """Updates a registered model from a run's folder.

    Args:
        key: key of the run, which is the same in every store.
        name: name of the registered model.
        upload_gib: size in GiB up to which a model's files are uploaded.
        metric: metric that compares versions.
        lowest: True: a lower value is better.
        versions: versions of libraries.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        name: str,
        upload_gib: float,
        metric: str,
        lowest: bool,
        versions: Mapping[str, str],
    ) -> None:
        # Versions are recognized by the absolute path.
        self._folder, self._key, self._name = folder.absolute(), key, name
        self._upload_gib, self._metric, self._lowest, self._libraries = upload_gib, metric, lowest, versions
        self._done: set[Path] = set()
        self._run_id = self._experiment_id = ""

    def upload_bytes(self) -> int:
        """Count the bytes that have not been uploaded yet."""
        return sum(s.size for s in self._saved() if s.folder not in self._done and self._uploads(s))

    def write(self, client: MlflowClient, run_id: str, experiment_id: str) -> None:
        """Register models that are not registered yet, and delete versions whose checkpoint no longer
        exists."""
        from mlflow.exceptions import MlflowException

        saved = list(self._saved())
        folders = {each.folder for each in saved}
        if folders == self._done:
            return
        self._run_id, self._experiment_id = run_id, experiment_id
        try:
            client.create_registered_model(self._name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self._versions(client)
        for each in saved:
            if each.folder in versions:
                continue
            try:
                self._register(client, each)
            except FileNotFoundError:
                # The run may remove an old checkpoint while this thread reads it.
                if each.folder.exists():
                    raise
        for folder, version in versions.items():
            # Deleted only after the newest version exists: otherwise MLflow would reuse the number.
            if folder not in folders and not folder.exists():
                client.delete_model_version(self._name, version.version)
        self._name_best(client)
        self._done = folders

    def _saved(self) -> Iterator[Saved]:
        """Return the checkpoints from the first to the last, then the trained model."""
        folders = {folder: step_of(folder) for folder in reversed(checkpoints_in(self._folder))}
        model = self._folder / "model"
        with suppress(ValueError, KeyError, TypeError):  # training did not finish
            folders[model] = int(read_mapping(self._folder / "summary.json")["steps"])
        yield from (Saved(step, folder, folder == model) for folder, step in folders.items())

    def _uploads(self, saved: Saved) -> bool:
        return saved.loadable and saved.size <= self._upload_gib * GIB

    def _versions(self, client: MlflowClient) -> dict[Path, ModelVersion]:
        """Map each folder of this run to its version."""
        versions = client.search_model_versions(f"name = '{self._name}'", max_results=1000)
        mine = [version for version in versions if version.tags.get(KEY_TAG) == self._key]
        return {Path(version.tags[FOLDER]): version for version in mine if FOLDER in version.tags}

    def _register(self, client: MlflowClient, saved: Saved) -> None:
        metrics = self._metrics(saved.step)
        tags = {KEY_TAG: self._key, STEP: str(saved.step), FOLDER: str(saved.folder)}
        model = self._logged_model(client, saved, metrics, tags)
        tags |= {MODEL: model.model_id, UPLOADED: str(self._uploads(saved)).lower()}
        compared = metrics.get(self._metric)
        if compared is not None and math.isfinite(compared.value):
            tags |= {METRIC: compared.key, VALUE: repr(compared.value)}
        what = "model" if saved.loadable else "checkpoint"
        description = f"The {what} after step {saved.step}, in {saved.folder}."
        if not saved.loadable:
            description += f" As a Hugging Face folder: `grpox export {saved.folder} OUT_DIR`"
        elif not self._uploads(saved):
            description += f" Its weights ({format_bytes(saved.size)}) were not uploaded."
        version = client.create_model_version(
            self._name,
            model.artifact_location,
            self._run_id,
            tags=tags,
            description=description,
            await_creation_for=0,  # ready on return; MLflow would print that it waits
            model_id=model.model_id,
        )
        # A server does this by itself, a database does not.
        link = json.dumps([{"name": version.name, "version": int(version.version)}])
        client.set_logged_model_tags(model.model_id, {VERSIONS: link})

    def _logged_model(
        self, client: MlflowClient, saved: Saved, metrics: Mapping[str, Metric], tags: dict[str, str]
    ) -> LoggedModel:
        """Log the model with files and metrics, as MLflow's runs show it; continue an interrupted attempt."""
        from mlflow.entities import LoggedModelOutput, Metric

        run_id, experiment = self._run_id, self._experiment_id
        models = client.search_logged_models([experiment], f"source_run_id = '{run_id}'", max_results=1000)
        model = next((each for each in models if each.tags.get(FOLDER) == str(saved.folder)), None)
        if model is None:
            name = self._name.replace(".", "-")
            model = client.create_logged_model(experiment, name, run_id, tags, model_type="text-generation")
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, saved.step)])
        if model.status != "READY":
            self._write_files(client, saved, model.model_id)
            linked = [
                Metric(m.key, m.value, m.timestamp, m.step, model_id=model.model_id, run_id=run_id)
                for m in metrics.values()
                if m.key.startswith(_LINKED) and math.isfinite(m.value)
            ]
            for batch in in_requests(linked, 500):
                client.log_batch(run_id, metrics=batch, synchronous=True)
            client.finalize_logged_model(model.model_id, "READY")
        return model

    def _write_files(self, client: MlflowClient, saved: Saved, model_id: str) -> None:
        libraries = [name for name in ("torch", "transformers") if name in self._libraries]
        # A local suffix such as +cpu denotes a build that no index has.
        requirements = "".join(f"{name}=={self._libraries[name].partition('+')[0]}\n" for name in libraries)
        texts = {"MLmodel": self._mlmodel(saved, model_id), "requirements.txt": requirements}
        with suppress(OSError):
            texts[CARD] = (saved.folder / CARD).read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            client.log_model_artifacts(model_id, folder)
        # Small files of a Hugging Face folder: tokenizer, chat template, config.
        for path in sorted(saved.folder.iterdir()) if saved.loadable else ():
            if path.is_file() and path.name != CARD and not path.name.endswith(_WEIGHT_SUFFIXES):
                client.log_model_artifact(model_id, str(path), "components/tokenizer")
        if self._uploads(saved):
            client.log_model_artifacts(model_id, str(saved.folder), WEIGHTS)

    def _mlmodel(self, saved: Saved, model_id: str) -> str:
        """Compose the file MLmodel, which defines for MLflow how to load the weights and from which folder."""
        versions = defaultdict(lambda: "unknown", self._libraries)
        folder = str(saved.folder)
        flavors: dict[str, Any] = {"grpox": {"folder": folder, "version": versions["grpox"]}}
        if saved.loadable:
            flavors["transformers"] = {
                "transformers_version": versions["transformers"],
                "code": None,
                "task": "text-generation",
                "instance_type": "TextGenerationPipeline",
                "pipeline_model_type": "AutoModelForCausalLM",
                "source_model_name": folder,
                "components": ["tokenizer"],
                "tokenizer_type": "AutoTokenizer",
                **({"model_binary": WEIGHTS} if self._uploads(saved) else {"local_base_model_path": folder}),
            }
        else:
            flavors["grpox"]["export"] = f"grpox export {folder} OUT_DIR"
        saved_at = datetime.fromtimestamp(saved.folder.stat().st_mtime, UTC)
        content = {
            "artifact_path": model_id,
            "flavors": flavors,
            "mlflow_version": versions["mlflow"],
            "model_id": model_id,
            "model_size_bytes": saved.size,
            "run_id": self._run_id,
            "signature": SIGNATURE,
            "utc_time_created": saved_at.strftime("%Y-%m-%d %H:%M:%S.%f"),
        }
        return str(yaml.safe_dump(content, sort_keys=False, width=1000))

    def _metrics(self, step: int) -> dict[str, Metric]:
        """Read the metrics of the policy after `step` steps, by name; of a repeated step, the last values."""
        last: dict[str, Metric] = {}
        for values, _ in recorded_metrics(self._folder / METRICS).pieces():
            last |= {value.key: value for value in values if value.step == step}
        return last

    def _name_best(self, client: MlflowClient) -> None:
        """Give the alias to the best of this run's versions, unless the version that has it is better.

        Among equal values the later version is better, as a run's last version is its trained model.
        """

        def rank(version: ModelVersion) -> tuple[float, int]:
            value = float(version.tags[VALUE])
            return -value if self._lowest else value, int(version.version)

        versions = self._versions(client).values()
        mine = [each for each in versions if each.tags.get(METRIC) == self._metric and VALUE in each.tags]
        if not mine:
            return
        best = max(mine, key=rank)
        holder = client.get_registered_model(self._name).aliases.get(BEST)
        before = None if holder is None else client.get_model_version(self._name, holder)
        if before is None or before.tags.get(METRIC) != self._metric or rank(best) > rank(before):
            client.set_registered_model_alias(self._name, BEST, best.version)
