"""An observer changes hyperparameters of a run and ends it: on all ranks, and in a resumed run too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import MakeDistribution
from support.killing import finish
from support.run_files import metrics_of, summary_of

PLUGIN = '''
from grpox import ComponentSpec, hookimpl


class Steers:
    """Halves the learning rate after step 2, widens the clip after step 3, and ends the run after step 4."""

    @hookimpl
    def grpox_step_finished(self, step, control):
        if step == 2:
            control.set("learning_rate_factor", 0.5)
            control.set("beta", control.hyperparameters["beta"] / 2)
        if step == 3:
            control.set("loss.clip_low", 0.3)
        if step == 4:
            control.stop("four steps are enough")


@hookimpl
def grpox_observers():
    return [ComponentSpec("steers", "steers:Steers")]
'''
ARGUMENTS = (
    *("quickstart", "tracking={steers: {}}", "output_dir=run", "evaluation=null", "checkpoint.every=1"),
    *("train.max_steps=8", "train.warmup_steps=0", "train.lr_scheduler_type=constant", "train.beta=0.25"),
    *("train.per_device_train_batch_size=16", "train.steps_per_generation=1"),
    *("train.gradient_accumulation_steps=1", "train.generation_batch_size=null"),
)


def test_it_changes_the_run_on_all_ranks(
    tmp_path: Path, make_distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(make_distribution("steers", PLUGIN)))
    finish(tmp_path, *ARGUMENTS, ranks=2)
    run = tmp_path / "run"
    summary, steps = summary_of(run), metrics_of(run)
    assert summary["steps"] == 4
    assert summary["stopped_early"] == {"step": 4, "reason": "four steps are enough"}
    rate = steps[0]["learning_rate"]
    assert [metrics["learning_rate"] / rate for metrics in steps] == [1, 1, 0.5, 0.5]
    half = {"hyperparameters/learning_rate_factor": 0.5, "hyperparameters/beta": 0.125}
    wider = half | {"hyperparameters/loss.clip_low": 0.3}
    assert [hyperparameters_in(metrics) for metrics in steps] == [{}, {}, half, wider]
    last = run / "checkpoints" / "step-00000004"
    saved = json.loads((last / "run.json").read_text())
    assert saved["hyperparameters"] == {"learning_rate_factor": 0.5, "beta": 0.125, "loss.clip_low": 0.3}
    assert saved["stop_reason"] == "four steps are enough"

    # From the checkpoint of step 3 the run goes on with the rate that was halved after step 2.
    shutil.rmtree(last)
    (run / "summary.json").unlink()
    finish(tmp_path, "--resume", "run", ranks=2)
    same = ("loss", "grad_norm", "learning_rate", "hyperparameters/learning_rate_factor")
    assert [metrics_of(run)[-1][name] for name in same] == [steps[-1][name] for name in same]
    assert summary_of(run)["stopped_early"]["step"] == 4


def hyperparameters_in(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith("hyperparameters/")}
