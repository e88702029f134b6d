"""Rewards, columns and lengths before a run: every mistake of a run file in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpox.errors import ConfigError, Problem
from grpox.runfile.load import resolve_config
from grpox.runfile.objects import Given

FILE = """
def by_name(completions, gold, answer, size=3): ...
def by_place(completions, answer, /): ...
def of_any(**columns): ...
class Declares:
    reads_columns = ("gold",)
    def __call__(self, completions, **columns): ...
class Signature:
    def __call__(self, completions, gold): ...
class Silent: ...
class Wants:
    def __init__(self, config): ...
    def __call__(self, completions, **columns): ...
"""
Check = Callable[..., list[Problem]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """``check(*rewards, section={...})``: the problems of a run with 9 rows of a prompt and an answer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    (tmp_path / "train.jsonl").write_text((json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n") * 9)
    (tmp_path / "r.py").write_text(FILE)

    def problems(*rewards: Any, given: Given | None = None, **sections: Any) -> list[Problem]:
        config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "rewards": list(rewards) or ["exact"],
            "train": {"num_generations": 4, "per_device_train_batch_size": 8},
            "sampling": {"max_completion_length": 10},
            "tracking": {},
        }
        try:
            resolve_config(config | sections, tmp_path, "test", given=given)
        except ConfigError as error:
            return list(error.problems)
        return []

    return problems


def told(problems: list[Problem]) -> list[tuple[str, str]]:
    return [(problem.key, problem.what) for problem in problems]


def needs(label: str, column: str, data: str = "the data") -> str:
    return f"reward '{label}' needs column '{column}', which {data} lacks"


JUDGE = {"name": "judge", "url": "http://h", "model": "m", "prompt": "{prompt} {gold} {completion}"}


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"name": "exact", "column": "gold"}, "rewards[0].column"),
        ({"name": "math", "column": "gold"}, "rewards[0].column"),
        ({"name": "code", "column": "gold"}, "rewards[0].column"),
        ({"name": "cosine", "max_length": 3, "column": "gold"}, "rewards[0].column"),
        ({"name": "regex", "pattern": "(a)", "column": "gold"}, "rewards[0].column"),
        ({"name": "http", "url": "http://h", "columns": ["answer", "gold"]}, "rewards[0]"),
        (JUDGE, "rewards[0]"),
        ({"path": "r.py:by_name"}, "rewards[0]"),
        ({"path": "r.py:Declares"}, "rewards[0]"),
        ({"path": "r.py:Signature"}, "rewards[0]"),
    ],
)
def test_a_column_that_the_data_lacks(check: Check, reward: dict[str, Any], key: str) -> None:
    label = reward.get("name") or reward["path"].partition(":")[2]
    assert told(check(reward)) == [(key, needs(label, "gold"))]


def test_columns_that_need_not_be_there(check: Check) -> None:
    regex = {"name": "regex", "pattern": "a"}
    assert check(regex, {"path": "r.py:of_any"}, {"name": "length", "target": 3}, "exact") == []


def test_the_held_out_data_is_compared_with_the_rewards_that_score_it(check: Check, tmp_path: Path) -> None:
    (tmp_path / "held.csv").write_text("prompt,gold\na,b\n")
    held_out = {"path": "held.csv"}
    lacks = ("rewards[0].column", needs("exact", "answer", "the evaluation data"))
    assert told(check(evaluation=held_out)) == [lacks]
    own = held_out | {"rewards": [{"name": "exact", "column": "gold"}, {"name": "exact", "column": "godl"}]}
    (problem,) = check(evaluation=own)
    assert (problem.key, problem.nearest) == ("evaluation.rewards[1].column", "gold")


def test_columns_of_rows_given_in_python_and_of_data_that_is_not_read(check: Check) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "a", "gold": "b"}] * 9)
    assert told(check(given=Given(dataset=rows))) == [("rewards[0].column", needs("exact", "answer"))]
    assert check({"name": "exact", "column": "gold"}, data={"path": "org/set"}) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "by_place",
            "takes 'completions' by position, and grpox gives all arguments by name",
        ),
        ("Silent", "is a class whose objects cannot be called"),
        (
            "Wants",
            "is built without an argument, as it has no Config, which its __init__ does not take: "
            "missing a required argument: 'config'",
        ),
    ],
)
def test_a_function_that_cannot_be_called(check: Check, name: str, what: str) -> None:
    assert told(check({"path": f"r.py:{name}"})) == [("rewards[0]", f"reward '{name}' {what}")]


@pytest.mark.parametrize("parts", [{}, {"text_config": {"max_position_embeddings": 30}}, {"n_positions": 30}])
def test_lengths_beyond_the_positions_of_the_model(check: Check, tmp_path: Path, parts: dict[str, Any]) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(parts or {"max_position_embeddings": 30}))
    assert check(data={"path": "train.jsonl", "max_prompt_length": 20}) == []
    (problem,) = check(data={"path": "train.jsonl", "max_prompt_length": 21})
    assert (problem.key, problem.given, problem.allowed) == ("data.max_prompt_length", "21", "at most 20")
    (problem,) = check(sampling={"max_completion_length": 30})
    assert (problem.key, problem.allowed) == ("sampling.max_completion_length", "less than 30")
    longer = {"path": "train.jsonl", "sampling": {"max_completion_length": 40}}
    (problem,) = check(evaluation=longer)
    assert problem.key == "evaluation.sampling.max_completion_length"


def test_a_model_without_positions_takes_any_length(check: Check, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text("{}")
    assert check(sampling={"max_completion_length": 10**6}) == []


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"rewards": [3, {"name": "exat"}], "data": {}}, {"rewards[0]", "rewards[1]", "data"}),
        (
            {"rewards": [{"name": "exact", "colum": "a", "weight": "b"}, "exat"]},
            {"rewards[0].weight", "rewards[1]"},
        ),
        ({"environment": [{"path": "r.py:Wants"}], "train": 3}, {"environment[0]", "train"}),
        ({"plugins": {"disable": 3}, "loss": "dapoo"}, {"plugins.disable", "loss"}),
    ],
)
def test_a_wrong_section_hides_no_mistake_of_a_component(
    check: Check, sections: dict[str, Any], keys: set[str]
) -> None:
    assert {problem.key for problem in check(**sections)} == keys
