"""A bad input: how to make it, the command that is given it, and what its error must name.

Every case runs in a folder of its own beside ``shared/``, which holds a good model and good data.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.resources
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from support.handlers import Ended
from support.patience import patient

QUICKSTART = Path(str(importlib.resources.files("grpox.runfile.recipes"))) / "quickstart"
RUN: dict[str, Any] = {
    "model": {"path": "../shared/model"},
    "data": {"path": "../shared/train.jsonl"},
    "rewards": [{"name": "exact", "column": "answer"}],
    "train": {"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4},
    "sampling": {"max_completion_length": 4},
    "evaluation": None,
    "tracking": {},
    "output_dir": "out",
}
"""A run of one step that nothing is wrong with."""

LONGEST_MESSAGE = 2000
HANGS_AFTER = 30.0
"""Seconds of a quiet machine after which a command that does not end hangs."""
Make = Callable[[Path], object]


def nothing(folder: Path) -> None:
    """The case is all in its arguments."""


@dataclass(frozen=True)
class Case:
    """One bad input."""

    name: str
    make: Make = nothing
    """Writes the input into the case's folder."""
    mentions: tuple[str, ...] = ()
    """Texts that the error must hold: the key or file, and what it is about."""
    arguments: tuple[str, ...] = ("validate", "run.yaml")
    opened: bool = False
    """True if tokenizer, model or data must be opened to detect it."""
    code: int = 2


def case(name: str, make: Make, line: str | tuple[str, ...], *mentions: str) -> Case:
    """A bad input of the command `line`."""
    return Case(name, make, mentions, tuple(line.split()) if isinstance(line, str) else line)


def make_shared(folder: Path) -> None:
    """A good model, and 16 good problems to train on."""
    shutil.copytree(QUICKSTART / "model", folder / "model")
    lines = (QUICKSTART / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:16]), encoding="utf-8")


def complaints(case: Case, outcome: Ended) -> list[str]:
    """List the errors of grpox's answer; empty if it is right."""
    text = outcome.errors
    found = []
    if outcome.code != case.code:
        found.append(f"exit code {outcome.code}, not {case.code}")
    messages = re.split(r"^(?=error:)", text, flags=re.MULTILINE)[1:]
    if not messages and "Usage: " not in text:
        found.append("no line that begins with 'error:'")
    if "Traceback (most recent call last)" in outcome.output + text:
        found.append("a traceback")
    if "--traceback" in text:
        found.append("an error of Python in place of one of grpox")
    if (longest := max((len(message) for message in messages), default=0)) and longest > LONGEST_MESSAGE:
        found.append(f"a message of {longest} characters")
    if raw := {character for character in text if not character.isprintable()} - {"\n"}:
        found.append(f"raw control characters {sorted(map(ascii, raw))}")
    found += [f"does not name {mention!r}" for mention in case.mentions if mention not in text]
    return found


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """`RUN` with the values at dotted keys replaced; a number reaches into a list."""
    run = copy.deepcopy(RUN)
    for key, value in changes.items():
        *above, last = key.split(".")
        container: Any = run
        for part in above:
            if isinstance(container, list):
                container = container[int(part)]
            else:
                if not isinstance(container.get(part), dict | list):
                    container[part] = {}
                container = container[part]
        container[int(last) if isinstance(container, list) else last] = value
    return run


def run_file(run: dict[str, Any]) -> Make:
    """Writes `run` to run.yaml."""
    text = yaml.safe_dump(run, sort_keys=False, allow_unicode=True)
    # PyYAML writes 1e+300, which it does not read back as the number it is; YAML 1.2 does.
    return lambda folder: (folder / "run.yaml").write_text(text, encoding="utf-8")


def raw(content: str | bytes | Callable[[], bytes], name: str = "run.yaml") -> Make:
    """Return what writes `content` to a file as it is; a function is called for it when the file is written."""

    def make(folder: Path) -> None:
        data = content() if callable(content) else content
        (folder / name).write_bytes(data.encode("utf-8") if isinstance(data, str) else data)

    return make


def together(*makers: Make) -> Make:
    """Does one after the other."""
    return lambda folder: [maker(folder) for maker in makers]


def numbered(prefix: str, cases: Iterable[Case]) -> list[Case]:
    """The same cases, their names begun with what they are about."""
    return [Case(**{**vars(case), "name": f"{prefix}: {case.name}"}) for case in cases]


@contextlib.contextmanager
def given_up_when_it_hangs() -> Iterator[None]:
    """Interrupt what hangs, and fail even where the interruption was taken for another error."""
    interrupted = []

    def give_up(_number: int, _frame: FrameType | None) -> None:
        interrupted.append(True)
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, patient(HANGS_AFTER))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        assert not interrupted, "it hangs"
