"""The runs of a sweep's arguments, and invalid arguments."""

from __future__ import annotations

import pytest

from grpox.cli.sweep_grid import read_grid, split_values
from grpox.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-6,1e-5", ["1e-6", "1e-5"]),
        ("1e-6, 1e-5 ", ["1e-6", "1e-5"]),
        ("grpo", ["grpo"]),
        ("[a,b]", ["[a,b]"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{name: dapo, clip_high: 0.3},grpo", ["{name: dapo, clip_high: 0.3}", "grpo"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b','c'", ["'a,b'", "'c'"]),
        ("['a]',b],c", ["['a]',b]", "c"]),
        ("don't,won't", ["don't", "won't"]),
        ("train[:1000],train[:2000]", ["train[:1000]", "train[:2000]"]),
        ("a,,b", ["a", "", "b"]),
        ("", [""]),
    ],
)
def test_commas_separate_values_but_within_quotes_and_brackets(text: str, values: list[str]) -> None:
    assert list(split_values(text)) == values


def test_the_grid_is_every_combination_the_last_axis_fastest() -> None:
    grid = read_grid(["train.learning_rate=1e-6,1e-5", "train.max_steps=3", "loss=grpo,dapo"], "0,1")
    runs = list(grid.runs())
    assert len(runs) == 8
    assert [tuple(setting.values()) for setting, _ in runs[:3]] == [
        ("1e-6", "grpo", "0"), ("1e-6", "grpo", "1"), ("1e-6", "dapo", "0"),
    ]  # fmt: skip
    assert list(grid.axes.items())[-1] == ("train.seed", ("0", "1"))
    assert runs[0][1] == ["train.learning_rate=1e-6", "train.max_steps=3", "loss=grpo", "train.seed=0"]


def test_an_override_keeps_its_place_by_which_a_later_one_wins() -> None:
    grid = read_grid(["loss=grpo,dapo", "loss.clip_high=0.3"], None)
    assert list(grid.runs())[1][1] == ["loss=dapo", "loss.clip_high=0.3"]


def test_a_key_is_told_by_its_last_part_where_that_is_enough() -> None:
    grid = read_grid(["train.beta=0,1", "sampling.top_p=0.9,1", "data.path=a,b", "model.path=c,d"], None)
    assert grid.names == {
        "train.beta": "beta", "sampling.top_p": "top_p", "data.path": "data.path", "model.path": "model.path",
    }  # fmt: skip
    assert read_grid(["rewards[0].weight=1,2"], None).names == {"rewards.0.weight": "rewards.0.weight"}


@pytest.mark.parametrize(
    ("arguments", "seeds", "key", "told"),
    [
        ([], None, "", "nothing to sweep"),
        (["train.max_steps=3"], None, "", "nothing to sweep"),
        (["train.beta=0,0.1", "train.beta=1"], None, "train.beta", "given twice"),
        (["train.seed=1,2"], "3,4", "train.seed", "given twice"),
        (["train.beta=0,0.0"], None, "train.beta", "same value twice"),
        (["train.beta=0,,1"], None, "train.beta", "is empty"),
        (["output_dir=a,b"], None, "output_dir", "cannot be swept"),
        (["rewards.0.apiKey=a,b"], None, "rewards.0.apiKey", "a secret cannot be swept"),
        (["rewards.0.url=http://a:b@c,d"], None, "rewards.0.url", "a secret cannot be swept"),
    ],
)
def test_what_makes_no_grid_is_told(arguments: list[str], seeds: str | None, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_grid(arguments, seeds)
    [problem] = caught.value.problems
    assert problem.key == key
    assert told in problem.what


def test_one_seed_is_an_axis_of_one_run() -> None:
    assert list(read_grid([], "7").runs()) == [({"train.seed": "7"}, ["train.seed=7"])]
