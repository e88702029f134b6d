"""Every command line of the docs is one that grpox takes: subcommand, options, and the run file's keys."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from grpox.cli.app import app
from grpox.config import RunConfig
from grpox.runfile.load import load_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "plugins" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GRPOX = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:.*\bpython -m |.*\s-m |\.venv/bin/)?grpox (?P<words>.+)$")
"""A line that calls grpox, perhaps through a launcher or with variables set; what follows."""
END = re.compile(r"^(?:[|>&;]|\d?>)")

MADE_BEFORE = re.compile(r"\bpath\b|=mine|=gmpo")
"""What a page makes before it names it: the file of a loss, a package, the folder of a model."""


def called(page: Path) -> list[list[str]]:
    """The words behind `grpox` of each command that the page shows."""
    found = []
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "console", "bash", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if match := GRPOX.match(line):
                words = shlex.split(match["words"], comments=True)
                end = next((place for place, word in enumerate(words) if END.match(word)), len(words))
                found.append(words[:end])
    return found


COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}"[:90]) for page in PAGES for words in called(page)
]
ROOT_COMMAND: Any = typer.main.get_command(app)


def parsed(words: list[str]) -> Any:
    """The context of the command that `words` call; a wrong option or argument raises."""
    command, context, rest = ROOT_COMMAND, None, list(words)
    while hasattr(command, "commands"):
        context = command.make_context("grpox", [], parent=context, resilient_parsing=True)
        assert rest, words
        assert rest[0] in command.commands, f"{rest[0]} is no command"
        command = command.commands[rest.pop(0)]
    return command.make_context(words[0], rest, parent=context)


def test_there_are_many() -> None:
    assert len(COMMANDS) > 70


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_docs_is_one_that_grpox_takes(words: list[str]) -> None:
    with suppress(SystemExit):  # of --help
        parsed(words)


@pytest.mark.parametrize(
    "wrong", ["trian quickstart", "train --world-size", "plugins lst", "train quickstart --no-such"]
)
def test_a_command_that_is_wrong_would_be_seen(wrong: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - typer's own, whose kind is not public
        parsed(wrong.split())


@pytest.mark.parametrize(
    "words", [each for each in COMMANDS if each.values[0][0] in ("train", "validate", "plan", "eval", "sweep")]
)
def test_what_a_command_changes_is_in_the_run_file(words: list[str]) -> None:
    changes = [word for word in words[1:] if re.match(r"[\w.\[\]]+=", word)]
    keys = {re.split(r"[.=\[]", change)[0] for change in changes}
    assert keys <= set(RunConfig.model_fields)
    recipe = words[1].removesuffix(".yaml")
    if recipe.startswith("quickstart") and words[0] != "sweep" and not MADE_BEFORE.search(" ".join(changes)):
        load_run(recipe, changes)
