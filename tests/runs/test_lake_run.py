"""The recipe lake: a few steps of episodes with advantages of turns, as the record has them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from support.fixtures import GrpoxCommand

from grpox.contracts import AdvantageInputs, Turn
from grpox_advantages.configs import GigpoConfig
from grpox_advantages.turns import Gigpo

SHORT = (
    "train.max_steps=2",
    "train.per_device_train_batch_size=32",
    "train.num_generations=8",
    "evaluation=null",
    "tracking={}",
    "logging.save_completions_every=1",
    "alarms.steps=2",
)


@pytest.fixture(scope="module")
def steps(grpox: GrpoxCommand, folder: Path) -> list[dict[str, Any]]:
    done = grpox("train", "lake", *SHORT)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (folder / "runs" / "lake" / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"] for line in lines if "metrics" in line]


def test_episodes_end_at_the_goal_in_a_hole_or_after_ten_turns(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        ended = step["episodes/ended_by/done"] + step["episodes/ended_by/turns"]
        assert ended + step["episodes/ended_by/length"] == pytest.approx(1)
        assert step["episodes/success"] == pytest.approx(step["rewards/environment/mean"])
        assert 1 <= step["turns/min"] <= step["turns/max"] <= 10
        assert step["grad_norm"] > 0


def test_both_steps_are_free_of_faults(steps: list[dict[str, Any]], folder: Path) -> None:
    summary = json.loads((folder / "runs" / "lake" / "summary.json").read_text())
    assert summary["steps"] == len(steps) == 2
    assert summary["alarms"] == []


def test_advantages_are_those_of_the_recorded_states_and_rewards(
    steps: list[dict[str, Any]], folder: Path
) -> None:
    rows = parquet.read_table(folder / "runs" / "lake" / "completions" / "step_000001.parquet").to_pylist()
    turns = [tuple(Turn(**turn) for turn in json.loads(row["turns"])) for row in rows]
    groups = torch.tensor([row["group"] for row in rows])
    inputs = AdvantageInputs(
        rewards=torch.tensor([[row["rewards/environment"]] for row in rows]),
        weights=torch.ones(1),
        group_ids=groups,
        prompt_ids=groups,
        lengths=torch.tensor([row["completion_length"] for row in rows]),
        model_masks=[],
        columns={},
        step=1,
        turns=turns,
        labels=("environment",),
    )
    advantages = Gigpo(GigpoConfig(gamma=0.95)).scale(inputs)
    for row, of_row, values in zip(rows, turns, advantages, strict=True):
        tokens = [turn.end - turn.start for turn in of_row]
        mean = sum(count * float(each) for count, each in zip(tokens, values, strict=True)) / sum(tokens)
        assert row["advantage"] == pytest.approx(mean, abs=1e-5)
    assert any(len(values.unique()) > 1 for values in advantages)


def test_a_group_shares_its_map_and_most_turns_a_state(steps: list[dict[str, Any]], folder: Path) -> None:
    rows = parquet.read_table(folder / "runs" / "lake" / "completions" / "step_000001.parquet").to_pylist()
    assert len({(row["group"], row["prompt"]) for row in rows}) == len({row["group"] for row in rows}) == 4
    states = Counter((row["group"], turn["state_key"]) for row in rows for turn in json.loads(row["turns"]))
    assert sum(count for count in states.values() if count > 1) >= 0.7 * states.total()
