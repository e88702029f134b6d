"""Whole runs of episodes: two turns with tokens of an environment between them, and rewards in lists."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.killing import finish, recorded
from support.run_files import SHORT, completions_of, metrics_of

from grpox.observing.page.data import read_samples
from grpox.observing.token_files import has_tokens, read_tokens

HERE = Path(__file__).parent
FEW = [*SHORT, "train.per_device_train_batch_size=32", "train.num_generations=8"]
EPISODES = [
    *FEW,
    "generator={path: 'episodes.py:TwoTurns'}",
    "advantage={path: 'episodes.py:PerTurn'}",
    "rewards=[{path: 'episodes.py:nothing', isolation: thread}]",
    "train.learning_rate=1.0e-3",
]


@pytest.fixture(scope="module", autouse=True)
def episodes(folder: Path) -> None:
    shutil.copy(HERE / "episodes.py", folder)


def sevens(run: Path, step: int) -> float:
    rows = completions_of(run, step)
    return sum(json.loads(row["rollout_extra"])["sevens"] for row in rows) / len(rows)


def test_episodes_of_two_turns_are_trained_on_by_turn(folder: Path) -> None:
    run = folder / "runs" / "turns"
    own = ["train.max_steps=12", "logging.save_completions_every=1", "output_dir=runs/turns"]
    finish(folder, "quickstart", *EPISODES, *own, ranks=2)
    first = completions_of(run, 1)
    assert len(first) == 64
    for row in first:
        assert json.loads(row["rollout_extra"])["answer"] == ["+1=", {"turn": 0}]
        assert row["finish_reason"] == "turns"
        assert "+1=" in row["completion"]
    assert {row["reward"] for row in first} == {0}  # all that is learnt comes from the turns' own rewards
    assert any(row["advantage"] for row in first)
    assert sevens(run, 12) > sevens(run, 1) + 0.3
    lengths = [each.get("completions/max_length", 0) for each in metrics_of(run)]
    assert max(lengths) <= 4  # of the model; the environment's three tokens are none of its length
    of_key = {(row["group"], row["sample"]): row for row in first}
    keys = [key for key in of_key if has_tokens(run, 1, *key)]
    assert len(keys) == 8
    for key in keys:
        row, tokens = of_key[key], read_tokens(run, 1, *key)
        assert "".join(token["text"] for token in tokens) == row["completion"]
        turns = [range(turn["start"], turn["end"]) for turn in json.loads(row["turns"])]
        for place, token in enumerate(tokens):
            number = next((n for n, turn in enumerate(turns) if place in turn), None)
            assert token["turn"] == number
            is_observed = number is None
            assert token["kind"] == ("observation" if is_observed else "model")
            numbers = [token[name] for name in ("logprob", "policy_logprob", "ratio", "advantage", "entropy")]
            assert [each is None for each in numbers] == [is_observed] * 5
            assert token["mask"] == (not is_observed)
        own = [token["advantage"] for token in tokens if token["turn"] is not None]
        assert sum(own) / len(own) == pytest.approx(row["advantage"], abs=1e-6)
    batches, _ = read_samples(run)
    assert "sevens" in batches[0].rows[0]["extra"]["rollout"]


def test_lists_for_completions_that_arrive_one_by_one_are_those_of_whole_batches(folder: Path) -> None:
    """Groups are then scored while others are sampled, in calls of any number of groups."""
    functions = ("digits", "places, weight: 0.25", "of_turns, weight: 2")
    own = [
        f"rewards=[{', '.join(f'{{path: episodes.py:{each}}}' for each in functions)}]",
        "advantage={path: 'episodes.py:FromLists'}",
        *("logging.save_completions_every=1", "train.max_steps=3", "train.learning_rate=1.0e-3"),
    ]
    for name in ("TwoTurns", "OneByOne"):
        generator = f"generator={{path: 'episodes.py:{name}'}}"
        finish(folder, "quickstart", *FEW, *own, generator, f"output_dir=runs/{name}", ranks=2)
    together, one_by_one = (folder / "runs" / name for name in ("TwoTurns", "OneByOne"))
    for step in (1, 2, 3):
        assert completions_of(together, step) == completions_of(one_by_one, step)
    assert len({row["advantage"] for row in completions_of(one_by_one, 1)}) > 8
    assert recorded(together) == recorded(one_by_one)


def test_data_that_differs_by_rank_ends_the_run_and_says_so(folder: Path) -> None:
    own = ["data={source: {path: 'episodes.py:ByRank'}}", "rewards=[{path: 'episodes.py:nothing'}]"]
    done = finish(
        folder, "quickstart", *FEW, *own, "train.max_steps=2", "output_dir=runs/ranks", ranks=2, code=1
    )
    assert "the data differs by rank: ranks 0 and 1" in done
