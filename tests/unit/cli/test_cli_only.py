"""What is built of the command line is what a command line asks for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import typer

from grpox.cli.app import app
from grpox.cli.only import only


def built(arguments: list[str]) -> Any:
    return typer.main.get_command(only(app, arguments))


def commands(group: Any) -> dict[str, Any]:
    """Name -> command, those of groups as ``group command``."""
    found = {}
    for name, command in group.commands.items():
        nested = commands(command) if hasattr(command, "commands") else {"": command}
        found |= {f"{name} {below}".strip(): each for below, each in nested.items()}
    return found


ALL = commands(typer.main.get_command(app))


@pytest.mark.parametrize("name", ALL)
def test_a_command_is_built_alone_and_is_the_same(name: str) -> None:
    found = commands(built([*name.split(), "--json"]))
    assert list(found) == [name]
    assert [(p.name, p.opts, p.required) for p in found[name].params] == [
        (p.name, p.opts, p.required) for p in ALL[name].params
    ]
    assert found[name].help == ALL[name].help
    assert inspect.unwrap(found[name].callback) is inspect.unwrap(ALL[name].callback)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["trian", "quickstart"], ["--traceback", "train"]])
def test_where_no_command_is_named_first_all_are_there(arguments: list[str]) -> None:
    assert list(commands(built(arguments))) == list(ALL)


def test_of_a_group_without_a_command_all_are_there() -> None:
    assert list(commands(built(["plugins", "--help"]))) == [name for name in ALL if name.startswith("plugins ")]


def test_nothing_is_taken_from_the_command_line_itself() -> None:
    only(app, ["plugins", "list"])
    assert list(commands(typer.main.get_command(app))) == list(ALL)
