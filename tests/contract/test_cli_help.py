"""Every command's help, as a new user reads it in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from grpox.cli import app as cli


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, f"{name} {child}".strip())


ALL = dict(commands(cli.all_commands()))


@pytest.mark.parametrize("name", ALL)
def test_every_help_describes_its_options_and_has_examples_that_fit_80_columns(name: str) -> None:
    silent = [p.opts[0] for p in ALL[name].params if not getattr(p, "hidden", False) and not p.help]
    assert silent == []
    assert f"grpox {name}".strip() + " " in ALL[name].help + " "
    assert "\n  grpox " in ALL[name].help
    shown = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output
    lines = [line.rstrip() for line in shown.splitlines()]
    examples = [f" {line.rstrip()}" for line in ALL[name].help.splitlines() if line.startswith("  ")]
    assert examples
    assert [line for line in examples if line not in lines] == []


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("plan", "[default: 2]"),
        ("validate", "[default: (this launch's)]"),
        ("report", "[default: (RUN_DIR/report.html)]"),
        ("plugins list", "[default: (all)]"),
    ],
)
def test_defaults_are_shown(command: str, default: str) -> None:
    assert default in CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "120"}).output


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["trian", "run.yaml"], "'train'"),
        (["plugins", "lst"], "'list'"),
        (["validate", "quickstart", "--world-siz", "2"], "--world-size"),
    ],
)
def test_a_misspelt_command_or_option_is_told_the_nearest(arguments: list[str], near: str) -> None:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert near in result.stderr
    assert result.stdout == ""
