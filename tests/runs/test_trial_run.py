"""Runs of components written from the documentation alone: many at once, killed and resumed, and a command."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from pyarrow import parquet
from support.fixtures import GrpoxCommand
from support.killing import assert_same, finish, kill_and_resume
from support.scoring_server import Answer, scoring_server

TRIAL = (
    Path(__file__).parents[1] / "contract" / "planted" / "trial.py",
    Path(__file__).with_name("trial_components.py"),
)
"""Files of components."""
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
    [file] = (file for file in TRIAL if re.search(rf"^(class|def) {name}\b", file.read_text(), re.MULTILINE))
    return json.dumps({"path": f"{file}:{name}", **parameters})


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
    patience = component("Patience", steps=50)
    overrides = [
        *SHORT[:1],
        *SHORT[2:],
        f"tracking={{patience: {patience}}}",
        f"loss={component('QuantileClip')}",
        f"advantage={component('RunningStd')}",
        f"correction={component('SequenceCap')}",
        f"rewards=[{component('close')}]",
        f"train.optimizer={component('Lion', weight_decay=0.01)}",
        f"train.scheduler={component('Restarts', periods=3)}",
        f"data={{source: {component('FromCsv', file=str(tmp_path / 'sums.csv'))}}}",
        "train.per_device_train_batch_size=16",
        "train.max_steps=8",
        "checkpoint.every=2",
    ]
    whole = tmp_path / "runs" / "whole"
    stderr = finish(tmp_path, "quickstart", *overrides, "output_dir=runs/whole", ranks=ranks)
    assert "warning" not in stderr
    assert_same(whole, kill_and_resume(tmp_path, "quickstart", *overrides, steps=5, ranks=ranks))

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
        f"tracking={{target: {component('TargetKl', target=1e-9)}}}",
        f"generator={component('AsksAgain')}",
        f"rewards=[{component('Digits')}]",
        f"advantage={component('RewardToGo')}",
        f"loss={component('ReferencePenalty')}",
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
    chosen = f"loss={component(loss)}"
    done = grpox("train", "quickstart", *SHORT, chosen, "train.learning_rate=1.0e-3", *arguments)
    assert done.returncode == 0, done.stderr
    rewards = [each["reward"] for each in metrics_of(tmp_path / loss) if "reward" in each]
    assert rewards[-1] > rewards[0]


def by_group(record: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yield each completion with the rewards of its group."""
    for row in record:
        yield row, [each["reward"] for each in record if each["group"] == row["group"]]


def less_the_others(row: dict[str, Any], rewards: list[float]) -> float:
    return float(row["reward"] - (sum(rewards) - row["reward"]) / (len(rewards) - 1))


def less_the_quantile(row: dict[str, Any], rewards: list[float]) -> float:
    """Return the reward less the 0.75-quantile of eight: a quarter of the way from the sixth to the seventh."""
    sixth, seventh = sorted(rewards)[5:7]
    return float(row["reward"] - (0.75 * sixth + 0.25 * seventh))


def by_difficulty(row: dict[str, Any], rewards: list[float]) -> float:
    first = int(row["prompt"].partition("+")[0])
    return float((row["reward"] - mean(rewards)) * (1 + first % 3))


def verdict(body: Any, _: int) -> Answer:
    """Give a point for each 7, at most two."""
    return 200, {"score": min(2, body["text"].count("7"))}


@pytest.mark.parametrize(
    ("loss", "advantage", "further", "formula"),
    [
        (component("GspoToken", low=0.2, high=0.2), "Rloo", "IcePop", less_the_others),
        (component("Gmpo"), "QuantileBaseline", "", less_the_quantile),
        (component("Gmpo"), "ByDifficulty", "IcePop", by_difficulty),
    ],
    ids=["the others", "quantile", "difficulty"],
)
def test_a_judge_teaches_by_the_advantages_of_the_formula(
    grpox: GrpoxCommand, tmp_path: Path, loss: str, advantage: str, further: str, formula: Any
) -> None:
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 40)]
    rows = ({"prompt": f"{a}+{b}=", "difficulty": 1 + a % 3} for a, b in random.Random(1).sample(pairs, 200))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with scoring_server(verdict) as judge:
        done = grpox(
            "train",
            "quickstart",
            *SHORT,
            f"data.path={tmp_path / 'sums.jsonl'}",
            f"loss={loss}",
            f"advantage={component(advantage)}",
            f"correction={component(further) if further else 'none'}",
            f"rewards=[{component('Judge', url=judge.url)}]",
            "train.per_device_train_batch_size=64",
            "train.max_steps=8",
            "train.learning_rate=1.0e-3",
            "sampling.temperature=2.0",
            "logging.save_completions_every=1",
            f"output_dir={tmp_path / 'run'}",
        )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
    records = [parquet.read_table(file).to_pylist() for file in files]
    assert len(records) == 4
    assert len(judge.bodies) == sum(map(len, records))
    for record in records:
        assert all(row["reward"] == min(2, row["completion"].count("7")) for row in record)
        wanted = [formula(row, rewards) for row, rewards in by_group(record)]
        assert [row["advantage"] for row in record] == pytest.approx(wanted, abs=1e-5)
    assert any(row["advantage"] for row in records[0])
    means = [mean(row["reward"] for row in record) for record in records]
    assert means[-1] > means[0] + 0.1
    metrics = metrics_of(tmp_path / "run")
    assert all(each["grad_norm"] > 0 for each in metrics)


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
