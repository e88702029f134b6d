"""The recipes of episodes: base models as weak as they say, steps that follow, and tokens that are exact.

One forward over each whole episode gives the log-probabilities with which its tokens were sampled.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.episode_runs import (
    FILE,
    check_text_of_chat,
    check_text_of_plain,
    kept_rollouts,
    largest_difference,
)
from support.killing import finish
from support.run_files import completions_of, metrics_of, summary_of

from grpox.contracts import AdvantageInputs, Turn
from grpox_advantages.configs import GigpoConfig
from grpox_advantages.turns import Gigpo

RECIPES = Path(__file__).parents[2] / "grpox" / "runfile" / "recipes"
MODEL = RECIPES / "quickstart" / "model"
KEEP = "tracking={keep: {path: 'environment_file.py:Keep'}}"
COMMON = [KEEP, "evaluation=null", "train.max_steps=1", "rewards=[{name: length, target: 8}]"]


@pytest.fixture(scope="module", autouse=True)
def environment_file(folder: Path) -> None:
    (folder / "environment_file.py").write_text(FILE)


def trained(folder: Path, name: str, *settings: str) -> Path:
    """Train a recipe for two short steps without a fault; return the run's folder."""
    short = (
        *("train.max_steps=2", "train.per_device_train_batch_size=32", "train.num_generations=8"),
        *("logging.save_completions_every=1", "alarms.steps=2", KEEP),
    )
    finish(folder, name, *short, *settings, f"output_dir=runs/{name}")
    run = folder / "runs" / name
    summary, rows = summary_of(run), completions_of(run, 1)
    assert (summary["steps"], summary["alarms"], len(rows)) == (2, [], 32)
    assert any(row["advantage"] for row in rows)
    return run


def test_the_calculators_base_model_forgets_to_carry_and_may_ask(folder: Path) -> None:
    run = trained(folder, "calculator")
    summary, rows = summary_of(run), completions_of(run, 1)
    assert 0.25 <= summary["success_before"] <= 0.5
    assert {"success_after", "calls_without_carry_after"} <= summary.keys()
    assert 4 <= sum("[" in row["completion"] for row in rows) <= 20  # a third of 32, give or take 3 deviations
    rollouts = kept_rollouts(run)
    called = [each for each in rollouts if each.episode and each.episode.results]
    assert 0 < len(called) < len(rollouts)
    assert largest_difference(RECIPES / "calculator" / "model", rollouts) < 1e-5


def test_the_guessing_base_model_rarely_finds_the_number(folder: Path) -> None:
    run = trained(folder, "guess")
    assert summary_of(run)["success_before"] <= 0.25
    assert {row["finish_reason"] for row in completions_of(run, 1)} <= {"turns", "done"}


def test_episodes_of_the_lake_have_the_advantages_of_their_states_and_rewards(folder: Path) -> None:
    run = trained(folder, "lake", "evaluation=null")
    for step in metrics_of(run):
        ended = step["episodes/ended_by/done"] + step["episodes/ended_by/turns"]
        assert ended + step["episodes/ended_by/length"] == pytest.approx(1)
        assert step["episodes/success"] == pytest.approx(step["rewards/environment/mean"])
        assert 1 <= step["turns/min"] <= step["turns/max"] <= 10
        assert step["grad_norm"] > 0
    rows = completions_of(run, 1)
    # A group shares its map, and most turns a state.
    assert len({(row["group"], row["prompt"]) for row in rows}) == len({row["group"] for row in rows}) == 4
    states = Counter((row["group"], turn["state_key"]) for row in rows for turn in json.loads(row["turns"]))
    assert sum(count for count in states.values() if count > 1) >= 0.7 * states.total()

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


@pytest.mark.parametrize(("name", "count"), [("calculator", 500), ("guess", 32)])
def test_held_out_prompts(name: str, count: int) -> None:
    train, heldout = (
        [json.loads(line) for line in (RECIPES / name / file).read_text().splitlines()]
        for file in ("train.jsonl", "heldout.jsonl")
    )
    assert len(heldout) == count
    if name == "calculator":
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    else:  # the prompt says nothing: each number once
        assert [row["number"] for row in heldout] == list(range(32))


@pytest.mark.parametrize(
    ("ranks", "isolation", "generator"),
    [(1, "process", "hf"), (2, "none", "{name: hf, gather_weights: false}")],
)
def test_tokens_of_plain_episodes_are_exact(folder: Path, ranks: int, isolation: str, generator: str) -> None:
    settings = (
        *(f"generator={generator}", "environment={path: 'environment_file.py:Again'}"),
        f"episodes={{max_turn_tokens: 6, max_turns: 4, isolation: {isolation}}}",
        *("sampling.max_completion_length=30", "train.per_device_train_batch_size=32"),
    )
    finish(folder, "quickstart", *COMMON, *settings, f"output_dir=plain{ranks}", ranks=ranks)
    rollouts = kept_rollouts(folder / f"plain{ranks}")
    assert len({len(rollout.turns) for rollout in rollouts}) > 1
    assert {rollout.finish_reason for rollout in rollouts} & {"done", "turns"}
    assert largest_difference(MODEL, rollouts) < 1e-5
    check_text_of_plain(MODEL, rollouts)


def test_tokens_of_a_conversation_of_a_real_model_are_exact(folder: Path, smollm2: Path) -> None:
    prompts = ["What is 4 + 4?", "What is 7 + 12? Answer with a number."]
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": prompt}], "answer": "8"} for prompt in prompts
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        *(f"model.path={smollm2}", "data.path=chat.jsonl", "environment={path: 'environment_file.py:Chat'}"),
        *("episodes={max_turn_tokens: 40}", "sampling.max_completion_length=160", "output_dir=chat"),
        "train={per_device_train_batch_size: 4, num_generations: 2, gradient_accumulation_steps: 1}",
    )
    finish(folder, "smollm2", *COMMON, *settings)
    rollouts = kept_rollouts(folder / "chat")
    assert max(len(rollout.turns) for rollout in rollouts) > 1
    assert largest_difference(smollm2, rollouts) < 5e-4
    check_text_of_chat(smollm2, prompts, rollouts)
