"""A run and a sweep on a real MLflow server, as a program reads them and as a browser shows them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.chromium import MISSING, Browser, executable

if TYPE_CHECKING:
    from mlflow.entities import Run
    from support.mlflow_serving import Server


GrpoxCommand = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 4


@pytest.fixture(scope="module")
def trained(mlflow_server: Server, folder: Path, grpox: GrpoxCommand) -> Run:
    """The quickstart for a few steps, with everything that MLflow can be given."""
    done = grpox(
        "train", "quickstart", f"train.max_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=1",
        "logging.system_metrics_every=1", "output_dir=runs/shown", "tracking.mlflow.run_name=shown",
        f"tracking.mlflow.tracking_uri={mlflow_server.uri}", "tracking.mlflow.experiment=pages",
        "tracking.mlflow.traces=2", "tracking.mlflow.register_as=adder",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # On a slow machine the end of the run may not have waited long enough for all of it.
    synced = grpox("sync", "runs/shown")
    assert synced.returncode == 0, synced.stderr
    told = json.loads((folder / "runs" / "shown" / "mlflow.json").read_text())
    return mlflow_server.client.get_run(told["run_id"])


def test_the_server_has_it_all(mlflow_server: Server, trained: Run, folder: Path, grpox: GrpoxCommand) -> None:
    assert trained.info.status == "FINISHED"
    assert {entry.tags[0].value: entry.dataset.name for entry in trained.inputs.dataset_inputs} == {
        "train": "train.jsonl", "eval": "heldout.jsonl",
    }  # fmt: skip
    assert "system/cpu_utilization_percentage" in trained.data.metrics
    client = mlflow_server.client
    assert "eval_table.json" in {entry.path for entry in client.list_artifacts(trained.info.run_id)}
    opened = grpox("runs", "open", "runs/shown", "--no-browser").stdout.splitlines()[0]
    page = f"#/experiments/{trained.info.experiment_id}/runs/{trained.info.run_id}"
    assert opened == f"run:    {mlflow_server.uri}/{page}"
    traces = client.search_traces(locations=[trained.info.experiment_id], run_id=trained.info.run_id)
    assert len(traces) == 2 * STEPS
    for trace in traces:
        assert {given.name for given in trace.info.assessments} == {"reward", "rewards/exact"}
        assert {span.name for span in trace.data.spans} == {"rollout", "generate", "rewards/exact"}


def test_the_model_is_registered(mlflow_server: Server, trained: Run, folder: Path, tmp_path: Path) -> None:
    import mlflow

    client = mlflow_server.client
    versions = client.search_model_versions("name = 'adder'")
    kinds = {Path(v.tags["grpox.folder"]).name: v for v in versions}
    # The first checkpoint is gone, and its version with it.
    assert sorted(Path(v.tags["grpox.folder"]).name for v in versions) == ["model", f"step-{STEPS:08d}"]
    model = kinds["model"]
    assert client.get_model_version_by_alias("adder", "best").version == model.version
    place = {"dst_path": str(tmp_path), "tracking_uri": mlflow_server.uri}
    fetched = Path(mlflow.artifacts.download_artifacts(model.source, **place))
    own = folder / "runs" / "shown" / "model"
    assert (fetched / "model" / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    card = (fetched / "README.md").read_text()
    assert "train.jsonl (sha256 " in card
    assert "| evaluation/accuracy |" in card
    assert str(folder) not in card


def test_a_sweep_is_a_run_with_children(mlflow_server: Server, folder: Path, grpox: GrpoxCommand) -> None:
    command = (
        "sweep", "quickstart", "--seeds", "0,1", "train.max_steps=2", "evaluation=null", "output_dir=runs/two",
        f"tracking.mlflow.tracking_uri={mlflow_server.uri}", "tracking.mlflow.experiment=sweeps",
    )  # fmt: skip
    done = grpox(*command, "--parallel", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    [parent], children = _family(mlflow_server)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["train.seed"] == "0, 1"
    assert {child.info.run_name for child in children} == {"seed=0", "seed=1"}
    rewards = {child.info.run_name: child.data.metrics["reward"] for child in children}
    assert parent.data.metrics["best/reward"] == max(rewards.values())
    assert rewards[parent.data.tags["grpox.best"]] == max(rewards.values())
    written = {path: path.stat().st_mtime_ns for path in (folder / "runs" / "two-sweep").glob("*/summary.json")}
    assert len(written) == 2

    again = grpox(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 already complete" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert [[run.info.run_id for run in runs] for runs in _family(mlflow_server)] == [
        [run.info.run_id for run in runs] for runs in ([parent], children)
    ]


def _family(server: Server) -> tuple[list[Run], list[Run]]:
    experiment = server.client.get_experiment_by_name("sweeps")
    found = server.client.search_runs([experiment.experiment_id], order_by=["attributes.run_name ASC"])
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert len(parents) + len(children) == len(found)
    return parents, children


@pytest.mark.skipif(executable() is None, reason=MISSING)
def test_a_browser_shows_all_of_it(mlflow_server: Server, trained: Run, folder: Path, tmp_path: Path) -> None:
    page = f"{mlflow_server.uri}/#/experiments/{trained.info.experiment_id}/runs/{trained.info.run_id}"
    with Browser(tmp_path) as browser:
        browser.open(page)
        browser.wait_for("shown", "evaluation/accuracy", "train.learning_rate", "train.jsonl")
        browser.open(f"{page}/model-metrics")
        browser.wait_for("clip_ratio", "completions")
        drawn = ".js-plotly-plot .scatterlayer path.js-line, svg path.recharts-curve"
        count = f"document.querySelectorAll('{drawn}').length"
        browser.wait(lambda: browser.value(count) >= 1, "no curve is drawn")
        browser.open(f"{page}/artifacts/eval_table.json")
        browser.wait_for("prompt", "completion", "rewards/exact", "step 1")
        experiment, client = trained.info.experiment_id, mlflow_server.client
        traces = client.search_traces(locations=[experiment], run_id=trained.info.run_id, include_spans=False)
        browser.open(f"{page}/traces")
        browser.wait_for("reward", "exact", *(trace.info.request_preview for trace in traces))
        version = client.get_model_version_by_alias("adder", "best").version
        browser.open(f"{mlflow_server.uri}/#/models/adder")
        browser.wait_for(f"Version {version}", "best", "evaluation/accuracy")
        browser.open((folder / "runs" / "shown" / "report.html").as_uri())
        browser.wait_for("Reward", "Completions", "prompts and completions")
        assert browser.value("document.querySelectorAll('.uplot canvas').length") >= 5
