"""Tokens of episodes are exact: one forward over each whole episode gives what was sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.episode_runs import (
    FILE,
    check_text_of_chat,
    check_text_of_plain,
    kept_rollouts,
    largest_difference,
)
from support.fixtures import GrpoxCommand

RECIPES = Path(__file__).parents[2] / "grpox" / "runfile" / "recipes"
MODEL = RECIPES / "quickstart" / "model"
COMMON = [
    "tracking={keep: {path: 'environment_file.py:Keep'}}",
    "evaluation=null",
    "train.max_steps=1",
    "rewards=[{name: length, target: 8}]",
]


@pytest.fixture(scope="module", autouse=True)
def environment_file(folder: Path) -> None:
    (folder / "environment_file.py").write_text(FILE)


@pytest.mark.parametrize(
    ("ranks", "isolation", "generator"),
    [(1, "process", "hf"), (2, "none", "{name: hf, gather_weights: false}")],
)
def test_plain_episodes(grpox: GrpoxCommand, folder: Path, ranks: int, isolation: str, generator: str) -> None:
    run = folder / f"plain{ranks}"
    done = grpox(
        "train",
        "quickstart",
        *COMMON,
        f"generator={generator}",
        "environment={path: 'environment_file.py:Again'}",
        f"episodes={{max_turn_tokens: 6, max_turns: 4, isolation: {isolation}}}",
        "sampling.max_completion_length=30",
        "train.per_device_train_batch_size=32",
        f"output_dir={run}",
        ranks=ranks,
    )
    assert done.returncode == 0, done.stderr
    rollouts = kept_rollouts(run)
    assert len({len(rollout.turns) for rollout in rollouts}) > 1
    assert {rollout.finish_reason for rollout in rollouts} & {"done", "turns"}
    assert largest_difference(MODEL, rollouts) < 1e-5
    check_text_of_plain(MODEL, rollouts)


def test_conversations_with_calls_of_a_tool(grpox: GrpoxCommand, folder: Path) -> None:
    run = folder / "calls"
    done = grpox("train", "calculator", *COMMON[:3], f"output_dir={run}")
    assert done.returncode == 0, done.stderr
    rollouts = kept_rollouts(run)
    called = [each for each in rollouts if each.episode and each.episode.results]
    assert 0 < len(called) < len(rollouts)
    assert largest_difference(RECIPES / "calculator" / "model", rollouts) < 1e-5


def test_a_conversation_of_a_real_model(grpox: GrpoxCommand, folder: Path, smollm2: Path) -> None:
    run = folder / "chat"
    prompts = ["What is 4 + 4?", "What is 7 + 12? Answer with a number."]
    rows = [{"prompt": [{"role": "user", "content": prompt}], "answer": "8"} for prompt in prompts]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = grpox(
        "train",
        "smollm2",
        *COMMON,
        f"model.path={smollm2}",
        "data.path=chat.jsonl",
        "environment={path: 'environment_file.py:Chat'}",
        "episodes={max_turn_tokens: 40}",
        "sampling.max_completion_length=160",
        "train={per_device_train_batch_size: 4, num_generations: 2, gradient_accumulation_steps: 1}",
        f"output_dir={run}",
    )
    assert done.returncode == 0, done.stderr
    rollouts = kept_rollouts(run)
    assert max(len(rollout.turns) for rollout in rollouts) > 1
    assert largest_difference(smollm2, rollouts) < 5e-4
    check_text_of_chat(smollm2, prompts, rollouts)
