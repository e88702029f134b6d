"""Commands, options, files and TOML that the pages show or name are there; test_docs_snippets.py runs most."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.docs_blocks import BLOCKS, COMMANDS, INLINE, PAGES, ROOT, SHELL, Block, blocks_in, name_of, prose

from grpox.cli.app import all_commands

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SHELL_BLOCKS = [block for block in BLOCKS if block.is_shell]


def lines() -> list[tuple[str, str]]:
    """(page, command) of each that is shown in a block or named in prose, without its comment."""
    found = {}
    for block in SHELL_BLOCKS:
        for line in block.script.splitlines():
            for part in line.partition(" #")[0].split(" && "):
                found[name_of(block.page), part.strip()] = None
    for page in PAGES:
        for code in INLINE.findall(prose(page)):
            found[name_of(page), " ".join(code.split())] = None
    return list(found)


LINES = lines()


def matching(pattern: str) -> list[tuple[str, ...]]:
    """(page, groups) of the commands that match."""
    return [(page, *match.groups()) for page, line in LINES if (match := re.match(pattern, line))]


MADE = matching(r"(?:\w+=\S+ )*make ([a-z -]+)$")
EXTRAS = matching(r".*pip install .*'\S*\[(\w+)\]'")
SCRIPTS = matching(r"(?:\.venv/bin/)?python ((?:benchmarks|requirements)/\S+\.py)(.*)")
FILES = matching(r".*?((?:examples|benchmarks|requirements|tests)/[\w./-]+)")


def test_they_are_found_and_begin_their_blocks() -> None:
    """Commands further down in a block would be taken for text."""
    counts = [len(found) for found in (SHELL_BLOCKS, MADE, EXTRAS, SCRIPTS, FILES)]
    assert all(count >= least for count, least in zip(counts, (50, 15, 4, 25, 30), strict=True)), counts
    text = [block for block in BLOCKS if block.language == "" and not block.is_shell]
    assert [block.place for block in text if any(map(SHELL.match, block.text.splitlines()))] == []
    languages = {"", "bash", "console", "math", "python", "pycon", "text", "toml", "yaml"}
    assert {block.language for block in BLOCKS} == languages


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_every_block_of_commands_is_bash(tmp_path: Path) -> None:
    for block in SHELL_BLOCKS:
        (tmp_path / block.place.replace("/", "_")).write_text(block.script, encoding="utf-8")
    each = ["bash", "-c", 'for file; do bash -n "$file"; done', "bash", *sorted(os.listdir(tmp_path))]
    done = subprocess.run(each, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def is_extra(page: str, extra: str) -> bool:
    example = ROOT / Path(page).parent / "pyproject.toml"
    project = tomllib.loads(example.read_text(encoding="utf-8"))["project"] if example.exists() else PROJECT
    return extra in project["optional-dependencies"]


def is_file(page: str, path: str) -> bool:
    folders = (ROOT, (ROOT / page).parent, ROOT / "plugins" / "examples" / "grpox-gmpo")
    return any((folder / path).exists() for folder in folders)


def options_of(script: Path) -> set[str]:
    """The options that a script's own code adds, or that of its neighbours which it imports from."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    found = {"--help"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and str(arg.value)[0] == "-"
            }
        elif isinstance(node, ast.ImportFrom) and (near := script.with_name(f"{node.module}.py")).exists():
            found |= options_of(near) if near != script else set()
    return found


def takes(script: str, rest: str) -> bool:
    words = shlex.split(rest.partition(" > ")[0])
    return {word.partition("=")[0] for word in words if word.startswith("-")} <= options_of(ROOT / script)


def test_targets_extras_files_and_options_are_there() -> None:
    assert [each for each in MADE if not set(each[1].split()) <= TARGETS] == []
    assert [each for each in EXTRAS if not is_extra(*each)] == []
    assert [each for each in FILES if not is_file(*each)] == []
    assert [each for each in SCRIPTS if not takes(*each[1:])] == []


@pytest.mark.parametrize("block", [*blocks_in("toml")], ids=lambda block: block.place)
def test_toml_is_valid_and_names_what_is_there(block: Block) -> None:
    """A name such as that of a warning can be imported."""
    text = re.sub(r'^--8<-- "(.+)"$', lambda at: (ROOT / at[1]).read_text(), block.text, flags=re.MULTILINE)
    assert tomllib.loads(text)
    for name in re.findall(r"\bgrpox(?:\.\w+)+", re.sub(r"entry-points\.grpox", "", text)):
        assert pkgutil.resolve_name(name)


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


def test_every_command_of_the_docs_is_there() -> None:
    found = named_commands()
    assert len(found) > 170
    for page, text in found:
        try:
            assert_known(text)
        except AssertionError as error:
            raise AssertionError(f"{page}: grpox {text}") from error
