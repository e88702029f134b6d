"""Commands of plugins: found when they are called, loaded alone, and refused where a name is taken."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from grpox.cli.app import CORE, app, load
from grpox.errors import ConfigError

HEADER = "import typer\nfrom grpox import CommandSpec, hookimpl\n"
GREET = '''
def greet(name: str, loud: bool = False) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}" + "!" * loud)
'''


def brings(name: str, target: str, extra: str = "") -> str:
    """A plugin module with one command."""
    spec = f"CommandSpec({name!r}, {target!r}, 'Greet somebody.', {extra})"
    return f"{HEADER}@hookimpl\ndef grpox_commands():\n    return [{spec}]\n{GREET}"


def grpox(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(caught.value)


# -- Those of grpox itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", CORE, ids=lambda spec: spec.name)
def test_the_help_in_the_list_is_the_first_line_of_the_commands_own(spec: Any) -> None:
    assert " ".join(load(spec).help.split("\n\n")[0].split()) == spec.help


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["recipes", "list"], ["grpox.cli.plugins", "grpox.cli.sweep", "grpox_losses"]),
        (["schema", "--help"], ["grpox.cli.plugins", "grpox.cli.eval", "grpox_losses"]),
        (["--help"], ["grpox.cli.plugins", "grpox.cli.eval", "grpox_mlflow.configs"]),
        (["sync", "--help"], ["grpox.cli.plugins", "grpox.cli.eval", "grpox_mlflow.folders", "mlflow"]),
    ],
)
def test_a_command_is_imported_alone(arguments: list[str], without: list[str]) -> None:
    code = (
        "import sys\nfrom grpox.cli.app import app\n"
        f"app({arguments}, standalone_mode=False)\n"
        f"print({set(without)} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


# -- Those of plugins ------------------------------------------------------------------------------------


def test_a_plugins_command_is_listed_and_called(make_distribution) -> None:
    make_distribution("grpox-foo", brings("greet", "grpox_foo:greet"))
    assert "Greet somebody." in grpox("--help").stdout
    assert grpox("greet", "Ada", "--loud").stdout == "hello Ada!\n"
    assert "grpox greet [OPTIONS]" in grpox("greet", "--help").stdout.replace("root", "grpox")


def test_a_typer_brings_a_group_and_a_mistyped_command_the_nearest(make_distribution) -> None:
    source = brings("people", "grpox_foo:people") + "people = typer.Typer()\npeople.command('greet')(greet)\n"
    make_distribution("grpox-foo", source)
    assert grpox("people", "greet", "Ada").stdout == "hello Ada\n"
    result = grpox("peple", "Ada")
    assert result.exit_code == 2
    assert "'people'" in result.stderr


def test_a_command_of_grpox_is_not_taken_over(make_distribution) -> None:
    make_distribution("grpox-foo", brings("recipes", "grpox_foo:greet"), version="2.5")
    assert "quickstart" in grpox("recipes", "list").stdout
    told = grpox("--help").stderr
    assert "the command 'recipes' of grpox-foo 2.5 is refused: grpox 0.1.0 has one of that name" in told


def test_a_command_of_two_plugins_is_refused_until_one_is_switched_off(make_distribution, monkeypatch) -> None:
    make_distribution("grpox-foo", brings("greet", "grpox_foo:greet"))
    make_distribution("grpox-bar", brings("greet", "grpox_bar:greet"), version="2.0")
    told = refused("greet", "Ada")
    assert "grpox-bar 2.0 and grpox-foo 1.0 both offer a command 'greet'" in told
    assert "GRPOX_DISABLE_PLUGINS=grpox-bar or GRPOX_DISABLE_PLUGINS=grpox-foo" in told
    assert "grpox does not choose between them" in grpox("--help").stderr
    listed = grpox("plugins", "list", "--kind", "command")
    assert "runs" in listed.stdout
    assert "conflict" in listed.stdout
    assert "both offer a command 'greet'" in grpox("plugins", "list", "--kind", "command", "--why").stdout
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", "grpox-bar")
    assert grpox("greet", "Ada").stdout == "hello Ada\n"


def test_a_third_partys_command_cannot_stand_in_for_a_built_in_one(make_distribution) -> None:
    make_distribution("grpox-foo", brings("sync", "grpox_foo:greet"))
    told = refused("sync", "runs/mine")
    assert "both offer a command 'sync'" in told
    assert "GRPOX_DISABLE_PLUGINS=grpox-foo" in told
    assert "GRPOX_DISABLE_PLUGINS=grpox," not in told


def test_a_broken_plugin_breaks_no_command_of_another_and_is_named_where_one_is_missing(
    make_distribution,
) -> None:
    make_distribution("grpox-bad", "import no_such_module_anywhere")
    make_distribution("grpox-foo", brings("greet", "grpox_foo:greet"))
    assert grpox("recipes", "list").stderr == ""
    called = grpox("greet", "Ada")
    assert (called.stdout, called.stderr) == ("hello Ada\n", "")
    helped = grpox("--help")
    assert helped.exit_code == 0
    assert "plugin 'plugin' of grpox-bad 1.0 is broken" in helped.stderr
    missing = grpox("wave")
    assert missing.exit_code == 2
    assert "No such command 'wave'" in missing.stderr
    assert "no_such_module_anywhere" in missing.stderr


def test_a_command_that_cannot_be_imported_is_told_with_its_distribution(make_distribution) -> None:
    make_distribution("grpox-foo", brings("greet", "no_such_module_anywhere:greet"))
    told = refused("greet")
    assert "the command 'greet' of grpox-foo 1.0 cannot be loaded: ModuleNotFoundError" in told


def test_what_a_command_requires_is_asked_before_it_runs(make_distribution) -> None:
    make_distribution("grpox-foo", brings("greet", "grpox_foo:greet", "requires=('no-such-dist>=1',)"))
    assert "Greet somebody." in grpox("greet", "--help").stdout
    assert "grpox greet needs no-such-dist>=1: not installed" in refused("greet", "Ada")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            brings("Greet", "a:b"),
            "grpox_commands offers 'Greet': a command may contain only lower-case letters",
        ),
        (brings("two words", "a:b"), "a command may contain only lower-case letters"),
        (HEADER + "@hookimpl\ndef grpox_commands():\n    return ['greet']", "offers a str, not a CommandSpec"),
    ],
)
def test_an_invalid_command_is_reported_to_its_author(make_distribution, source: str, reason: str) -> None:
    make_distribution("grpox-foo", source)
    assert reason in grpox("--help").stderr
