"""Each command and option of grpox that the docs show or name is there; test_docs_snippets.py runs most."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from support.docs_blocks import COMMANDS, INLINE, PAGES, name_of, prose

from grpox.cli.app import all_commands

ROOT_COMMAND: Any = all_commands()


def named_commands() -> list[tuple[str, str]]:
    """(page, words behind `grpox`) of each command that a page shows in a block or names in its prose."""
    found = {(command.page, shlex.join(command.words)): None for command in COMMANDS}
    for page in PAGES:
        for code in INLINE.findall(prose(page)):
            if match := re.match(r"(?:.* -m )?grpox (.+)", " ".join(code.split())):
                found[name_of(page), match[1].replace("\\|", "|")] = None
    return list(found)


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


@pytest.mark.parametrize(("page", "text"), named_commands())
def test_a_command_of_the_docs_is_there(page: str, text: str) -> None:
    assert_known(text)


def test_many_are_found_and_a_wrong_one_would_be_seen() -> None:
    assert len(named_commands()) > 170
    for wrong in ("plugins lst", "train --no-such"):
        with pytest.raises(AssertionError):
            assert_known(wrong)
