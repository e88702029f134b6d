"""Runs of components written from the documentation alone: many at once, killed and resumed, and a command."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import GrpoxCommand
from support.killing import assert_same, kill, start, wait_for_steps

TRIAL = Path(__file__).parents[1] / "contract" / "trial"
SHORT = (
    "evaluation=null",
    "tracking={}",
    "train.num_generations=8",
    "train.steps_per_generation=2",
    "train.gradient_accumulation_steps=1",
    "train.warmup_steps=0",
)
COMMAND = '''
import json
from pathlib import Path

import typer
from grpox import CommandSpec, hookimpl


def longest(run_dir: Path) -> None:
    """Print the number of steps that a run has recorded."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    typer.echo(f"{sum('metrics' in line for line in lines)} steps")


@hookimpl
def grpox_commands():
    return [CommandSpec("count-steps", "counting_plugin:longest", "Count a run's steps.")]
'''


def component(name: str, **parameters: Any) -> str:
    return json.dumps({"path": str(TRIAL / name), **parameters})


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if "metrics" in line]


@pytest.mark.parametrize("ranks", [1, 2])
def test_seven_components_at_once_are_resumed_bit_by_bit(tmp_path: Path, ranks: int) -> None:
    with (tmp_path / "sums.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "answer"])
        pairs = [(a, b) for a in range(10, 60) for b in range(10, 40)]
        rows.writerows((f"{a}+{b}=", a + b) for a, b in random.Random(1).sample(pairs, 400))
    patience = component("observers.py:Patience", steps=50)
    overrides = [
        *SHORT[:1],
        *SHORT[2:],
        f"tracking={{patience: {patience}}}",
        f"loss={component('losses.py:QuantileClip')}",
        f"advantage={component('advantages.py:RunningStd')}",
        f"correction={component('corrections.py:SequenceCap')}",
        f"rewards=[{component('rewards.py:close')}]",
        f"train.optimizer={component('training.py:Lion', weight_decay=0.01)}",
        f"train.scheduler={component('training.py:Restarts', periods=3)}",
        f"data={{source: {component('training.py:FromCsv', file=str(tmp_path / 'sums.csv'))}}}",
        "train.per_device_train_batch_size=16",
        "train.max_steps=8",
        "checkpoint.every=2",
    ]
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    process = start(tmp_path, "quickstart", *overrides, "output_dir=runs/whole", ranks=ranks)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "warning" not in stderr

    process = start(tmp_path, "quickstart", *overrides, "output_dir=runs/killed", ranks=ranks)
    assert wait_for_steps(process, killed, 5)
    kill(process)
    assert not (killed / "summary.json").exists()
    process = start(tmp_path, "--resume", "runs/killed", ranks=ranks)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert_same(whole, killed)

    highs = [metrics["quantile/high_mean"] for metrics in metrics_of(whole)]
    assert highs[0] == pytest.approx(1.2)
    assert len(set(highs)) > 2


def test_two_turns_with_rewards_of_parts_train_every_token_by_its_own(
    grpox: GrpoxCommand, tmp_path: Path
) -> None:
    run = tmp_path / "turns"
    done = grpox(
        "train",
        "quickstart",
        *(SHORT[0], *SHORT[2:]),
        f"tracking={{target: {component('observers.py:TargetKl', target=1e-9)}}}",
        f"generator={component('generators.py:AsksAgain')}",
        f"rewards=[{component('rewards.py:Digits')}]",
        f"advantage={component('advantages.py:RewardToGo')}",
        f"loss={component('losses.py:ReferencePenalty')}",
        "sampling.max_completion_length=11",
        "train.per_device_train_batch_size=32",
        "train.beta=0.01",
        "train.max_steps=4",
        f"output_dir={run}",
    )
    assert done.returncode == 0, done.stderr
    metrics = metrics_of(run)
    assert len(metrics) == 4
    assert all(each["completions/max_length"] <= 8 for each in metrics if "completions/max_length" in each)
    # The first step does not move the policy away from the reference before it is measured.
    betas = [each.get("hyperparameters/beta", 0.01) for each in metrics]
    assert betas[1] == 0.005
    assert betas[-1] > 0.005


@pytest.mark.parametrize("loss", ["PairsOfAGroup", "RewardWeighted", "EntropyRegularised"])
def test_a_loss_with_further_inputs_trains(grpox: GrpoxCommand, tmp_path: Path, loss: str) -> None:
    arguments = ["train.per_device_train_batch_size=64", "train.max_steps=6", f"output_dir={tmp_path / loss}"]
    chosen = f"loss={component(f'losses.py:{loss}')}"
    done = grpox("train", "quickstart", *SHORT, chosen, "train.learning_rate=1.0e-3", *arguments)
    assert done.returncode == 0, done.stderr
    rewards = [each["reward"] for each in metrics_of(tmp_path / loss) if "reward" in each]
    assert rewards[-1] > rewards[0]


def test_a_plugin_adds_a_command(grpox: GrpoxCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "counting-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "counting_plugin.py").write_text(COMMAND)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[grpox]\nplugin = counting_plugin\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n{"step": 1, "evaluation": {}}\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    done = grpox("count-steps", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1 steps\n"), done.stderr
