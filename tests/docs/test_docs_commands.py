"""Every command line of the docs is one that grpox takes: subcommand, options, and the run file's keys."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from typing import Any

import pytest
from support.docs_blocks import COMMANDS, INLINE, PAGES, Command, name_of, prose

from grpox.cli.app import all_commands
from grpox.config import RunConfig

RUNS = ("train", "validate", "plan", "eval", "sweep")
ROOT_COMMAND: Any = all_commands()


def told(command: Command) -> str:
    return f"{command.page}: {command.line}"[:90]


def parsed(words: list[str]) -> Any:
    """The context of the command that `words` call; a wrong option or argument raises."""
    command, context, rest = ROOT_COMMAND, None, list(words)
    while hasattr(command, "commands"):
        context = command.make_context("grpox", [], parent=context, resilient_parsing=True)
        assert rest, words
        if rest[0].startswith("--"):  # an option of grpox itself, which would act at once
            assert rest[0] in {name for option in command.params for name in option.opts}, words
            return context
        assert rest[0] in command.commands, f"{rest[0]} is no command"
        command = command.commands[rest.pop(0)]
    return command.make_context(words[0], rest, parent=context)


def mentioned() -> list[tuple[str, str]]:
    """(page, words behind `grpox`) of each command that a page names in its prose."""
    found = {}
    for page in PAGES:
        for code in INLINE.findall(prose(page)):
            if match := re.match(r"(?:.* -m )?grpox (.+)", " ".join(code.split())):
                found[name_of(page), match[1].replace("\\|", "|")] = None
    return list(found)


def test_there_are_many() -> None:
    assert len(COMMANDS) > 90
    assert len(mentioned()) > 80


@pytest.mark.parametrize("command", COMMANDS, ids=told)
def test_a_command_of_the_docs_is_one_that_grpox_takes(command: Command) -> None:
    with suppress(SystemExit):  # of --help
        parsed(list(command.words))


@pytest.mark.parametrize(
    "wrong", ["trian quickstart", "train --world-size", "plugins lst", "train quickstart --no-such"]
)
def test_a_command_that_is_wrong_would_be_seen(wrong: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - typer's own, whose kind is not public
        parsed(wrong.split())


def assert_known(text: str) -> None:
    """Each command and option of `text` is there; what the command is about may be left out."""
    command, words = ROOT_COMMAND, shlex.split(text)
    for word in words:
        if word in ("--", "|"):
            return
        if not word.startswith("-") and hasattr(command, "commands"):
            assert word in command.commands, f"{word} is no command"
            command = command.commands[word]
        elif word.startswith("-"):
            options = {name for parameter in command.params for name in parameter.opts}
            assert word.partition("=")[0] in options | {"--help"}, f"{word} is no option"


@pytest.mark.parametrize(("page", "text"), mentioned())
def test_a_command_that_the_prose_names_is_there(page: str, text: str) -> None:
    assert_known(text)


@pytest.mark.parametrize("wrong", ["plugins lst", "runs --last 3", "train --no-such"])
def test_a_name_that_is_wrong_would_be_seen(wrong: str) -> None:
    with pytest.raises(AssertionError):
        assert_known(wrong)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.words[0] in RUNS], ids=told)
def test_what_a_command_changes_is_in_the_run_file(command: Command) -> None:
    changes = [word for word in command.words[1:] if re.match(r"[\w.\[\]]+=", word)]
    keys = {re.split(r"[.=\[]", change)[0] for change in changes}
    assert keys <= set(RunConfig.model_fields)
