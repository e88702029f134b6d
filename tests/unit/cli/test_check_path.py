"""`grpox plugins check` of an object in a file: its kind, its outcome, and the record of what passed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpox.cli.plugin_check import check_path
from grpox.errors import ConfigError
from grpox.plugins.component import kind_of
from grpox.plugins.load_object import load_object

SOURCE = """
import os

from grpox.environments import Environment, tool


class Loss:
    def per_token(self, inputs): ...


class Unclear:
    def build(self, thing): ...


def score(completions, **columns):
    return [float(len(completion)) for completion in completions]


def neighbour(completions, **columns):
    return score([*completions[1:], completions[0]])


class World(Environment):
    example_rows = ({"prompt": "Go."},)

    def reply(self, text):
        return "go on"

    @tool
    def crash(self) -> None:
        "End the process."
        os._exit(1)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"per_token": print}, "loss"),
        ({"scale": print}, "advantage"),
        ({"correct": print}, "correction"),
        ({"load": print}, "dataset"),
        ({"build": lambda self, parameters, learning_rate: None}, "optimizer"),
        ({"build": lambda self, optimizer, total_steps: None}, "scheduler"),
        ({"build": lambda self, thing: None}, ""),
        ({"grpox_run_started": print}, "observer"),
        ({"__call__": print}, "reward"),
        ({}, ""),
    ],
)
def test_the_methods_tell_the_kind(members: dict[str, Any], kind: str) -> None:
    assert kind_of(type("Mine", (), members)) == kind


def test_functions_are_rewards_and_numbers_nothing(mine: Path) -> None:
    assert kind_of(load_object(f"{mine}:score")) == "reward"
    assert kind_of(load_object(f"{mine}:World")) == "environment"
    assert kind_of(1) == ""


def test_a_kind_that_is_not_clear_or_unknown_is_asked_for(mine: Path) -> None:
    for name, kind, given in (("Unclear", None, f"{mine}:Unclear"), ("Loss", "los", "los")):
        with pytest.raises(ConfigError) as caught:
            check_path(Console(quiet=True), f"{mine}:{name}", {}, kind)
        [problem] = caught.value.problems
        assert (problem.key, problem.given) == ("--kind", given)
    assert problem.nearest == "loss"


def test_one_passes_and_one_fails(mine: Path) -> None:
    assert check_path(Console(quiet=True), f"{mine}:score", {}, None)
    assert not check_path(Console(quiet=True), f"{mine}:neighbour", {}, "reward")


def test_an_environment_whose_tool_ends_its_process_is_told_by_name(mine: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    assert not check_path(console, f"{mine}:World", {}, None)
    shown = console.export_text()
    assert "World  environment" in shown
    assert "tool 'crash': its process" in shown
    assert "1 failed" in shown
