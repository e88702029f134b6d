"""Commands of plugins: found when they are called, loaded alone, and refused where a name is taken."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("spec", CORE, ids=lambda spec: spec.name)
def test_the_help_in_the_list_is_the_first_line_of_the_commands_own(spec: Any) -> None:
    assert " ".join(load(spec).help.split("\n\n")[0].split()) == spec.help


HEAVY = {"torch", "transformers", "deepspeed", "vllm", "datasets", "mlflow"}
BEGUN = """
import sys
try:
    from grpox.cli import main
    main()
finally:
    print(sorted({names} & set(sys.modules)), file=sys.stderr)
"""


def without(names: set[str], *arguments: str, **variables: str) -> str:
    """Return what a command prints in a process of its own, which may import none of these modules."""
    command = [sys.executable, "-c", BEGUN.format(names=names), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == "[]\n"
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("recipes list", {"grpox.cli.plugins", "grpox.cli.sweep", "grpox_losses"}),
        ("schema --help", {"grpox.cli.plugins", "grpox.cli.eval", "grpox_losses"}),
        ("--help", HEAVY | {"pydantic", "yaml", "grpox.cli.plugins", "grpox.cli.eval", "grpox_mlflow.configs"}),
        ("sync --help", {"grpox.cli.plugins", "grpox.cli.eval", "grpox_mlflow.folders", "mlflow"}),
        ("plugins list", HEAVY | {"grpox.config"}),
        ("doctor --json", HEAVY),
    ],
)
def test_a_command_is_imported_alone_and_nothing_heavy(arguments: str, names: set[str]) -> None:
    assert without(names, *arguments.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grpox pl", ["plan", "plugins"]),
        ("grpox run", ["runs"]),  # a plugin's command
        ("grpox train --re", ["--resume"]),
        ("grpox runs list --la", ["--last"]),
        ("grpox train no-such-", []),  # the shell goes on with the names of files
    ],
)
def test_bash_is_answered_with_the_words_that_fit(line: str, words: list[str]) -> None:
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_GRPOX_COMPLETE": "complete_bash"}
    assert without(HEAVY, **asked).split() == words


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


def test_a_command_of_grpox_or_of_a_built_in_plugin_is_not_taken_over(make_distribution) -> None:
    make_distribution("grpox-foo", brings("recipes", "grpox_foo:greet"), version="2.5")
    assert "quickstart" in grpox("recipes", "list").stdout
    told = grpox("--help").stderr
    assert "the command 'recipes' of grpox-foo 2.5 is refused: grpox 0.1.0 has one of that name" in told
    make_distribution("grpox-bar", brings("sync", "grpox_bar:greet"))
    told = refused("sync", "runs/mine")
    assert "both offer a command 'sync'" in told
    assert "GRPOX_DISABLE_PLUGINS=grpox-bar" in told
    assert "GRPOX_DISABLE_PLUGINS=grpox," not in told


def test_a_broken_plugin_breaks_no_command_and_is_named_where_one_is_missing(make_distribution) -> None:
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


def test_a_command_that_cannot_be_imported_or_lacks_what_it_requires_is_told(make_distribution) -> None:
    make_distribution("grpox-foo", brings("greet", "no_such_module_anywhere:greet"))
    told = refused("greet")
    assert "the command 'greet' of grpox-foo 1.0 cannot be loaded: ModuleNotFoundError" in told
    make_distribution("grpox-bar", brings("wave", "grpox_bar:greet", "requires=('no-such-dist>=1',)"))
    assert "Greet somebody." in grpox("wave", "--help").stdout
    assert "grpox wave needs no-such-dist>=1: not installed" in refused("wave", "Ada")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (brings("Greet", "a:b"), "offers 'Greet': a command may contain only lower-case letters"),
        (brings("two words", "a:b"), "a command may contain only lower-case letters"),
        (HEADER + "@hookimpl\ndef grpox_commands():\n    return ['greet']", "offers a str, not a CommandSpec"),
    ],
)
def test_an_invalid_command_is_reported_to_its_author(make_distribution, source: str, reason: str) -> None:
    make_distribution("grpox-foo", source)
    assert reason in grpox("--help").stderr
