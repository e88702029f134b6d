"""A problem is blamed on what made it: a line of the run file, or the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.errors import ConfigError, Problem
from grpox.runfile.load import load_run
from grpox.runfile.overrides import Origin

LINES = {"model": 1, "model.path": 1, "train": 3, "train.beta": 4, "rewards": 6, "rewards[0]": 7}


@pytest.mark.parametrize(
    ("overridden", "key", "where"),
    [
        # The file has no foo: only the override made it.
        (["foo.bar"], "foo", "command line"),
        (["foo.bar"], "foo.bar", "command line"),
        (["foo.bar.deep"], "foo.bar", "command line"),
        # What such a section lacks is missing on the command line too.
        (["evaluation.every"], "evaluation.path", "command line"),
        (["train.optimizer.lr"], "train.optimizer", "command line"),
        (["rewards[1].weight"], "rewards[1]", "command line"),
        # The file has the section: an override of one of its keys answers for that key alone.
        (["train.max_steps"], "train", "run.yaml:3"),
        (["train.max_steps"], "train.beta", "run.yaml:4"),
        (["rewards[1].weight"], "rewards[0]", "run.yaml:7"),
        # A name that merely begins alike is another key.
        (["foo.bar"], "fo", "run.yaml"),
        (["train.optimizer_x"], "train.optimizer", "run.yaml:3"),
        # The section was replaced as a whole.
        (["train"], "train.beta", "command line"),
    ],
)
def test_where_a_key_was_written(overridden: list[str], key: str, where: str) -> None:
    assert Origin("run.yaml", Path("/inputs"), LINES, overridden).where(key) == where


def test_problems_of_the_command_line_come_last() -> None:
    origin = Origin("run.yaml", Path("/inputs"), LINES, ["foo.bar"])
    placed = origin.place([Problem("unknown key", key="foo"), Problem("too small", key="train.beta")])
    assert [(problem.where, problem.key) for problem in placed] == [
        ("run.yaml:4", "train.beta"),
        ("command line", "foo"),
    ]


def test_an_override_into_a_section_that_does_not_exist_is_told_as_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", ["trian.max_steps=3"])
    [problem] = caught.value.problems
    assert (problem.where, problem.key, problem.nearest) == ("command line", "trian", "train")
