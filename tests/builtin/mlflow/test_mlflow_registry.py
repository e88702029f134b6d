"""A run's model and checkpoints as versions of a registered model, in a real SQLite store."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.contexts import context_of
from support.mlflow_store import TrackedRun
from support.services import wait_until

from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.sync import sync

QUICKSTART = Path(__file__).parents[3] / "grpox" / "runfile" / "recipes" / "quickstart" / "model"
VERSIONS = {"grpox": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "mlflow": "3.17.2"}


class Registered(TrackedRun):
    """A run whose checkpoints and model are registered as `name`."""

    def __init__(self, folder: Path, store: str, name: str, **config: Any) -> None:
        evaluation = {"path": "h.jsonl", "accuracy": "exact"}
        run = context_of(folder, 4, evaluation=evaluation, **config.pop("run", {}))
        super().__init__(replace(run, versions=VERSIONS), store, register_as=name, **config)
        self.name = name

    def checkpoint(self, step: int, accuracy: float) -> Path:
        self.step(step, {"reward": accuracy / 2, "grad_norm": 1.0})
        self.evaluate(step, {"accuracy": accuracy})
        folder = self.run.output_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        self.tracker.grpox_checkpoint_saved()
        return folder

    def finish(self, steps: int = 4) -> None:
        shutil.copytree(QUICKSTART, self.run.output_dir / "model")
        (self.run.output_dir / "model" / "README.md").write_text("# adder\n")
        super().finish(steps)

    @property
    def versions(self) -> dict[str, Any]:
        """Step and kind -> version, in the order of their numbers."""
        found = self.client.search_model_versions(f"name = '{self.name}'")
        return {
            f"{v.tags['grpox.step']} {Path(v.tags['grpox.folder']).name}": v
            for v in sorted(found, key=lambda v: int(v.version))
        }

    @property
    def best(self) -> Any:
        return self.client.get_model_version_by_alias(self.name, "best")

    @property
    def has_best(self) -> bool:
        found = self.client.search_registered_models(f"name = '{self.name}'")
        return bool(found) and "best" in found[0].aliases

    def files(self, version: Any) -> Path:
        import mlflow

        return Path(mlflow.artifacts.download_artifacts(version.source, tracking_uri=self.store))


def test_the_model_is_uploaded_and_loads(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = Registered(tmp_path / "run", store, "adder-1").start()
    registered.checkpoint(2, accuracy=0.25)
    registered.checkpoint(4, accuracy=0.75)
    registered.finish()
    versions = registered.versions
    assert list(versions) == ["2 step-00000002", "4 step-00000004", "4 model"]
    model = versions["4 model"]
    assert registered.best.version == model.version  # of equals, what it was trained to
    assert model.tags["grpox.uploaded"] == "true"
    assert (model.tags["grpox.metric"], model.tags["grpox.value"]) == ("evaluation/accuracy", "0.75")
    logged = registered.client.get_logged_model(model.tags["grpox.model_id"])
    values = {metric.key: metric.value for metric in logged.metrics}
    assert values == {"reward": 0.375, "evaluation/accuracy": 0.75}
    run = registered.client.get_run(model.run_id)
    outputs = {output.model_id: output.step for output in run.outputs.model_outputs}
    assert (len(outputs), outputs[model.tags["grpox.model_id"]]) == (3, 4)
    _its_files_load(registered, model)
    checkpoint = versions["2 step-00000002"]
    assert (checkpoint.tags["grpox.uploaded"], "grpox export" in checkpoint.description) == ("false", True)
    folder = registered.files(checkpoint)
    assert not (folder / "model").exists()
    export = f"grpox export {checkpoint.tags['grpox.folder']} OUT_DIR"
    flavors = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]
    assert {name: flavor["export"] for name, flavor in flavors.items()} == {"grpox": export}
    monkeypatch.chdir(tmp_path)
    assert sync(Path("run")).status == "FINISHED"
    numbers = [[version.version for version in each.values()] for each in (registered.versions, versions)]
    assert numbers[0] == numbers[1]


def _its_files_load(registered: Registered, version: Any) -> None:
    import mlflow
    from mlflow.models import Model

    folder = registered.files(version)
    told = Model.load(str(folder))
    assert [column.name for column in told.signature.inputs.inputs] == ["prompt"]
    assert [column.name for column in told.signature.outputs.inputs] == ["completion"]
    assert (folder / "requirements.txt").read_text() == "torch==2.13.0\ntransformers==5.19.0\n"
    assert (folder / "README.md").read_text() == "# adder\n"
    weights = "model/model.safetensors"
    assert (folder / weights).read_bytes() == (registered.run.output_dir / weights).read_bytes()
    parts = mlflow.transformers.load_model(str(folder), return_type="components")
    text = parts["tokenizer"]("1+1=")
    assert parts["model"].config.vocab_size > max(text["input_ids"])
    # As of a model that is too large: the same, with the weights where they were trained.
    flavor = folder / "MLmodel"
    place = str(registered.run.output_dir / "model")
    flavor.write_text(flavor.read_text().replace("model_binary: model\n", f"local_base_model_path: {place}\n"))
    shutil.rmtree(folder / "model")
    pointed = mlflow.transformers.load_model(str(folder), return_type="components")
    assert pointed["model"].num_parameters() == parts["model"].num_parameters()


def test_a_large_model_stays_where_it_is_and_its_version_points_there(tmp_path: Path, store: str) -> None:
    registered = Registered(tmp_path / "run", store, "adder-2", upload_gib=0.0001).start()
    registered.checkpoint(4, accuracy=0.5)
    registered.finish()
    model = registered.versions["4 model"]
    assert model.tags["grpox.uploaded"] == "false"
    assert "were not uploaded" in model.description
    folder = registered.files(model)
    assert not (folder / "model").exists()
    flavor = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]["transformers"]
    assert flavor["local_base_model_path"] == str(registered.run.output_dir / "model")
    assert (folder / "components" / "tokenizer" / "tokenizer.json").exists()


def test_a_checkpoint_that_is_removed_takes_its_version_along(tmp_path: Path, store: str) -> None:
    registered = Registered(tmp_path / "run", store, "adder-3").start()
    first = registered.checkpoint(2, accuracy=0.9)
    wait_until(lambda: registered.has_best, "there is a best version", 60)
    assert list(registered.versions) == ["2 step-00000002"]
    registered.checkpoint(3, accuracy=0.5)
    shutil.rmtree(first)
    registered.finish()
    assert list(registered.versions) == ["3 step-00000003", "4 model"]
    assert registered.best.tags["grpox.step"] == "3"  # of step 4 nothing was evaluated


def test_best_goes_to_another_run_only_for_a_better_value(tmp_path: Path, store: str) -> None:
    lowest = {"checkpoint": {"best": "grad_norm", "best_is": "lowest"}}
    for folder, accuracy, best in (("a", 0.5, "a"), ("b", 0.25, "a"), ("c", 0.75, "c")):
        registered = Registered(tmp_path / folder, store, "adder-4").start()
        registered.checkpoint(4, accuracy=accuracy)
        registered.finish()
        assert f"/{best}/" in registered.best.tags["grpox.folder"]
    other = Registered(tmp_path / "d", store, "adder-4", run=lowest).start()
    other.checkpoint(4, accuracy=0.1)
    other.finish()
    assert "/d/" in other.best.tags["grpox.folder"]  # it is compared by something else
    assert other.best.tags["grpox.metric"] == "grad_norm"


def test_a_resumed_run_registers_nothing_twice_and_no_run_unasked(tmp_path: Path, store: str) -> None:
    registered = Registered(tmp_path / "run", store, "adder-5").start()
    registered.checkpoint(2, accuracy=0.25)
    registered.fail(ValueError("odd"))
    assert list(registered.versions) == ["2 step-00000002"]
    size = (registered.run.output_dir / "metrics.jsonl").stat().st_size
    registered.start(resumed_at=2, metrics_bytes=size)
    registered.checkpoint(4, accuracy=0.5)
    registered.finish()
    assert list(registered.versions) == ["2 step-00000002", "4 step-00000004", "4 model"]
    assert [int(v.version) for v in registered.versions.values()] == [1, 2, 3]
    other = Registered(tmp_path / "other", store, "adder-6")
    other.config = MlflowConfig(tracking_uri=store)
    other.start().checkpoint(2, accuracy=0.5)
    other.finish()
    assert other.client.search_registered_models("name = 'adder-6'") == []
