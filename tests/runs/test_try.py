"""`grpox try`: the prompts, completions, rewards and advantages of a run, of which nothing is left behind."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import GrpoxCommand

from grpox.data.schedule import PromptSampler
from grpox.runfile.load import load_run

REWARDS = """
def half(completions, completion_ids, **columns):
    return [None if place % 2 else 0.5 for place, _ in enumerate(completions)]
"""
MIXED = (
    *("quickstart", "--prompts", "2", "train.num_generations=4"),
    "rewards=[{name: exact, weight: 2}, {path: r.py:half, weight: -1}, {name: length, target: 3}]",
)


@pytest.fixture(scope="module")
def folder(empty_folder: Path) -> Path:
    (empty_folder / "r.py").write_text(REWARDS)
    return empty_folder


def tried(grpox: GrpoxCommand, *arguments: str, **options: Any) -> Any:
    done = grpox("try", *arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def mixed(grpox: GrpoxCommand, folder: Path) -> Any:
    return tried(grpox, *MIXED)


def test_the_prompts_are_the_first_of_the_run(mixed: Any) -> None:
    run = load_run("quickstart", ["train.num_generations=4"])
    assert run.num_prompts is not None
    size = run.plan.prompts_per_generation
    first = PromptSampler(run.num_prompts, size, shuffle=True, seed=run.config.train.seed).prompts_for(0)
    assert [each["row"] for each in mixed["prompts"]] == first[:2]
    lines = Path(str(run.config.data.path)).read_text().splitlines()
    for each in mixed["prompts"]:
        row = json.loads(lines[each["row"]])
        assert (each["prompt"], each["columns"]) == (row["prompt"], {"answer": row["answer"]})
        assert "".join(each["tokens"]) == each["text"] == row["prompt"]
        assert len(each["token_ids"]) == len(each["tokens"])


def test_rewards_sums_and_advantages_are_those_of_the_run_file(mixed: Any) -> None:
    assert mixed["weights"] == {"exact": 2, "half": -1, "length": 1}
    for each in mixed["prompts"]:
        assert len(each["completions"]) == 4
        sums = []
        for place, completion in enumerate(each["completions"]):
            exact = float(completion["text"].strip() == each["columns"]["answer"])
            length = max(-1, -abs(len(completion["token_ids"]) - 3) / 3)
            half = None if place % 2 else 0.5
            assert completion["rewards"] == {"exact": exact, "half": half, "length": pytest.approx(length)}
            assert completion["sum"] == pytest.approx(2 * exact + length - (half or 0))
            sums.append(completion["sum"])
        # `group` of GRPO: distance to the group's mean in standard deviations.
        spread, centre = statistics.stdev(sums) + 1e-4, statistics.mean(sums)
        advantages = [completion["advantage"] for completion in each["completions"]]
        assert advantages == pytest.approx([(total - centre) / spread for total in sums], abs=1e-4)


def test_nothing_is_written(mixed: Any, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"r.py"}


def test_the_table_of_many_rewards_fits_80_columns(grpox: GrpoxCommand, mixed: Any) -> None:
    shown = grpox("try", *MIXED)
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "sum = 2 * exact + -1 * half + 1 * length" in shown.stdout
    first = mixed["prompts"][0]
    assert "tokens  " + "|".join(first["tokens"]) in shown.stdout
    cells = [line.split() for line in shown.stdout.splitlines()]
    for completion in first["completions"]:
        assert any(f"{completion['advantage']:+.3f}" in row for row in cells)
    assert any("half" in row and "none" in row for row in cells)


def test_two_ranks_show_what_one_shows(grpox: GrpoxCommand, mixed: Any) -> None:
    both = tried(grpox, *MIXED, "train.gradient_accumulation_steps=1", ranks=2)
    assert [each["row"] for each in both["prompts"]] == [each["row"] for each in mixed["prompts"]]


def test_an_episode_is_shown_with_its_whole_conversation(grpox: GrpoxCommand) -> None:
    [prompt] = tried(grpox, "guess", "--prompts", "1")["prompts"]
    messages = [completion["messages"] for completion in prompt["completions"]]
    assert all({message["role"] for message in each} >= {"assistant", "user"} for each in messages)
    shown = grpox("try", "guess", "--prompts", "1")
    assert shown.returncode == 0, shown.stderr
    assert "assistant: " in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_a_mistake_is_told_before_anything_is_loaded(grpox: GrpoxCommand) -> None:
    done = grpox("try", "quickstart", "rewards=[{name: exact, column: anwser}]")
    assert done.returncode == 2
    assert "needs column 'anwser', which the data lacks" in done.stderr
    assert "reading prompts" not in done.stderr
