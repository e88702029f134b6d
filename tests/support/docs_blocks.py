"""Fenced blocks of the pages, and the commands in them."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from grpox.runfile.load import ResolvedRun

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "plugins" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PAGES += sorted((ROOT / "plugins" / "examples").glob("*/README.md"))
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*) ?(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
TITLE = re.compile(r'title="(.+)"')
NAME_IN_FIRST_LINE = re.compile(r"# (\w+\.(?:py|yaml))\n")
GRPOX = re.compile(
    r"^(?:\w+=\S+ )*(?P<launcher>.*\bpython -m |.*\s(?:-m|--module) |srun .*?|\.venv/bin/)?grpox (?P<words>.+)$"
)
"""A line that calls grpox, perhaps through a launcher or with variables set; what follows."""
END = re.compile(r"^(?:[|>&;]|\d?>)")
RANKS = re.compile(r"--(?:nproc-per-node|ntasks-per-node|num_accelerators)[= ](\d+)|-np (\d+)")
NODES = re.compile(r"--n(?:nodes|odes)[= ](\d+)")
PROGRAMS = "grpox|make|pip|python3|python|pytest|torchrun|deepspeed|srun|sbatch|mpirun|mlflow|tensorboard"
SHELL = re.compile(rf"(?:\w+=\S+ )*(?:\$ )?(?:\.venv/bin/\w|(?:{PROGRAMS})\s)")
"""Beginning of a line that is a command."""


def _tutorials() -> set[str]:
    """The pages that `tests/cold/test_tutorial.py` does word for word."""
    test = ast.parse((ROOT / "tests" / "cold" / "test_tutorial.py").read_text(encoding="utf-8"))
    assigned = [node for node in test.body if isinstance(node, ast.Assign)]
    [pages] = [node.value for node in assigned if ast.unparse(node.targets[0]) == "LEAVES"]
    return set(ast.literal_eval(pages))


TUTORIALS = _tutorials()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, without its indentation."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that it shows: of its title, or of a comment in its first line."""
        if self.language == "console":  # whose title says where it is typed
            return None
        found = TITLE.search(self.info) or NAME_IN_FIRST_LINE.match(self.text)
        return found[1] if found else None

    @property
    def is_done_by_the_tutorial(self) -> bool:
        """True if `tests/cold/test_tutorial.py` writes or runs it."""
        return self.page.stem in TUTORIALS and ("title=" in self.info or self.language == "console")

    @property
    def is_shell(self) -> bool:
        if self.language == "":
            return SHELL.match(self.text) is not None
        return self.language in ("console", "bash", "sh")

    @property
    def script(self) -> str:
        """The commands of a shell block without what they print."""
        text = self.text.replace("\\\n", " ")
        shown = re.findall(r"^\$ (.*\n)", text, re.MULTILINE)
        return "".join(shown) or text


@dataclass(frozen=True)
class Command:
    """A call of grpox on a page."""

    block: Block
    words: tuple[str, ...]
    output: str | None
    """The file that its output goes to."""
    ranks: int
    """Processes that the launcher in front of it starts."""

    @property
    def page(self) -> str:
        return name_of(self.block.page)

    @property
    def line(self) -> str:
        return " ".join(self.words)

    @property
    def needs_a_run(self) -> bool:
        """Tell whether it reads the files of a run, or loads modules that a run loads."""
        return self.words[0] in ("runs", "eval") or any(word.startswith("runs/") for word in self.words)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        body = textwrap.dedent(found["text"]) if found["indent"] else found["text"]
        yield Block(page, line, found["language"], found["info"], body)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


LISTINGS = ("docs/contracts.md", "docs/hooks.md")
"""Pages whose blocks list sources; a test compares them."""


def blocks_in(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and name_of(block.page) not in LISTINGS]


def files_of(page: str) -> dict[str, str]:
    """Name -> text of each file that a page shows; of a file that it shows twice, the last."""
    return {block.file: block.text for block in BLOCKS if name_of(block.page) == page and block.file}


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands_of(block: Block) -> Iterator[Command]:
    if not block.is_shell:
        return
    for line in block.script.splitlines():
        if match := GRPOX.match(line):
            words = shlex.split(match["words"], comments=True)
            end = next((place for place, word in enumerate(words) if END.match(word)), len(words))
            output = words[end + 1] if words[end : end + 1] == [">"] else None
            yield Command(block, tuple(words[:end]), output, _ranks(match["launcher"] or ""))


def _ranks(launcher: str) -> int:
    here, nodes = RANKS.search(launcher), NODES.search(launcher)
    return int(next(filter(None, here.groups()))) * (int(nodes[1]) if nodes else 1) if here else 1


COMMANDS = [command for block in BLOCKS for command in commands_of(block)]


def _collecting(runs: list[ResolvedRun]) -> Callable[..., dict[str, Any]]:
    def train_run(run: ResolvedRun, *resume: bool) -> dict[str, Any]:
        runs.append(run)
        return {"steps": 0}

    return train_run


@contextmanager
def training_left_out() -> Iterator[list[ResolvedRun]]:
    """Commands that train check their run as ever; it is collected in place of being trained."""
    runs: list[ResolvedRun] = []
    module = ModuleType("grpox.training.run")  # which takes seconds to import
    module.train_run = _collecting(runs)  # type: ignore[attr-defined]
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield runs
    finally:  # not by patch.dict, which would also drop what a command has imported, such as torch
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


@contextmanager
def training_replaced() -> Iterator[list[ResolvedRun]]:
    """The same for `grpox.train`."""
    runs: list[ResolvedRun] = []
    collect = _collecting(runs)
    with patch("grpox.training.python_run.open_run", lambda run, resume: nullcontext(collect(run))):
        yield runs
