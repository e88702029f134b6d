"""An observer changes hyperparameters of a run and ends it: on all ranks, and in a resumed run too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import GrpoxCommand

PLUGIN = '''
from grpox import ComponentSpec, hookimpl


class Steers:
    """Halves the learning rate after step 2, widens the clip after step 3, and ends the run after step 4."""

    @hookimpl
    def grpox_step_finished(self, step, control):
        if step == 2:
            control.set("learning_rate_factor", 0.5)
        if step == 3:
            control.set("loss.clip_low", 0.3)
        if step == 4:
            control.stop("four steps are enough")


@hookimpl
def grpox_observers():
    return [ComponentSpec("steers", "steers_plugin:Steers")]
'''
ARGUMENTS = (
    "quickstart",
    "train.max_steps=8",
    "train.warmup_steps=0",
    "train.lr_scheduler_type=constant",
    "train.per_device_train_batch_size=16",
    "train.steps_per_generation=1",
    "train.gradient_accumulation_steps=1",
    "train.generation_batch_size=null",
    "evaluation=null",
    "checkpoint.every=1",
)


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "steers-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "steers_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[grpox]\nplugin = steers_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(site))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", [2])
def test_it_changes_the_run_on_all_ranks(grpox: GrpoxCommand, folder: Path, ranks: int) -> None:
    run = folder / "runs" / f"steered-{ranks}"
    done = grpox("train", *ARGUMENTS, "tracking={steers: {}}", f"output_dir={run}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    summary, steps = json.loads((run / "summary.json").read_text()), metrics_of(run)
    assert summary["steps"] == 4
    assert summary["stopped_early"] == {"step": 4, "reason": "four steps are enough"}
    rate = steps[0]["learning_rate"]
    assert [metrics["learning_rate"] / rate for metrics in steps] == [1, 1, 0.5, 0.5]
    half = {"hyperparameters/learning_rate_factor": 0.5}
    assert [hyperparameters_in(metrics) for metrics in steps] == [
        {},
        {},
        half,
        half | {"hyperparameters/loss.clip_low": 0.3},
    ]
    last = run / "checkpoints" / "step-00000004"
    saved = json.loads((last / "run.json").read_text())
    assert saved["hyperparameters"] == {"learning_rate_factor": 0.5, "loss.clip_low": 0.3}
    assert saved["stop_reason"] == "four steps are enough"

    # From the checkpoint of step 3 the run goes on with the rate that was halved after step 2.
    shutil.rmtree(last)
    (run / "summary.json").unlink()
    done = grpox("train", "--resume", str(run), ranks=ranks)
    assert done.returncode == 0, done.stderr
    same = ("loss", "grad_norm", "learning_rate", "hyperparameters/learning_rate_factor")
    assert [metrics_of(run)[-1][name] for name in same] == [steps[-1][name] for name in same]
    assert json.loads((run / "summary.json").read_text())["stopped_early"]["step"] == 4


def hyperparameters_in(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith("hyperparameters/")}
