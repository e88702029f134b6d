"""Whole texts that tests compare with: each in a file of tests/golden/, which `make golden` writes anew.

Spaces at the ends of lines, with which tables are filled, are left out, and empty lines at the end of a text.
A text that differs by machine or run takes `replace`: ``golden(text, replace={str(tmp_path): "FOLDER"})``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "golden"
VARIABLE = "GRPOX_RENEW_GOLDEN"
COMMAND = "make golden"


class Golden:
    """The golden texts of one test."""

    def __init__(self, start: Path) -> None:
        """Take the path that all files of the test begin with."""
        self.start = start
        self.compared: set[Path] = set()

    def __call__(self, text: str, name: str = "", *, replace: Mapping[str, str] | None = None) -> None:
        """Compare a text with its file, or write the file where that is asked for."""
        for given, shown in (replace or {}).items():
            text = text.replace(given, shown)
        text = "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
        path = self.start.with_name(".".join(filter(None, (self.start.name, sanitised(name), "txt"))))
        assert path not in self.compared, f"{path} is compared twice in one test: give each text a name"
        self.compared.add(path)
        if os.environ.get(VARIABLE) == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        cure = f"if the new text is right: {COMMAND}"
        if not path.exists():
            pytest.fail(f"there is no {path}; {cure}\n{text}", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = unified_diff(expected.splitlines(), text.splitlines(), "as it was", "as it is", lineterm="")
            pytest.fail("\n".join([f"the text differs from {path}; {cure}", *lines]), pytrace=False)


def printed(renderable: RenderableType, console: Console | None = None) -> str:
    """Return what the console prints; default: one of 200 columns."""
    console = console or Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def sanitised(name: str) -> str:
    """Return a name without what is awkward in the name of a file."""
    return re.sub(r"[^\w.-]+", "_", name).strip("_.")


def start_of(file: Path, function: str, parameters: str) -> Path:
    """Return the path that the golden files of a test begin with."""
    name = "-".join(filter(None, (function, sanitised(parameters))))
    return FOLDER / file.relative_to(TESTS).with_suffix("") / name


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """A function that compares a text with the one kept in tests/golden/."""
    node = request.node
    parameters = node.callspec.id if hasattr(node, "callspec") else ""
    return Golden(start_of(node.path, node.originalname, parameters))
