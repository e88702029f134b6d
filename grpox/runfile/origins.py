"""Where each part of a run was written: a line of the run file, or the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpox.errors import Problem
from grpox.runfile.overrides import COMMAND_LINE

ARGUMENT = "train()"


@dataclass(frozen=True)
class Origin:
    """Knows the line or override behind each dotted key such as ``rewards[0].weight``."""

    source: str
    """What problems call the run file."""
    folder: Path
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: Sequence[str] = ()
    arguments: Collection[str] = ()
    """Keys whose value is an argument of `grpox.train`."""

    def with_arguments(self, keys: Collection[str]) -> Origin:
        return replace(self, arguments=keys)

    def where(self, key: str) -> str:
        """``run.yaml:12``, ``command line`` or ``train()``, by the longest known prefix of `key`."""
        if any(prefix in self.arguments for prefix in _prefixes(key)):
            return ARGUMENT
        # Whatever the file has below an overridden key was replaced.
        if any(prefix in self.overridden for prefix in _prefixes(key)):
            return COMMAND_LINE
        for prefix in _prefixes(key):
            if prefix in self.lines:
                return f"{self.source}:{self.lines[prefix]}"
            if self._made_by_override(prefix):
                return COMMAND_LINE
        return self.source

    def base(self, key: str) -> Path:
        """The folder against which a relative path given under `key` resolves."""
        return Path.cwd() if self.where(key) == COMMAND_LINE else self.folder

    def place(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same problems in the order of their lines, `where` filled in; indices as in ``rewards[0]``."""
        placed = []
        for problem in problems:
            key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", problem.key)
            placed.append(replace(problem, key=key, where=problem.where or self.where(key)))
        return sorted(placed, key=lambda problem: (problem.where == COMMAND_LINE, self._line(problem.key)))

    def _made_by_override(self, key: str) -> bool:
        """Whether `key`, which the file lacks, is there because an override set something below it."""
        return any(key in _prefixes(overridden) for overridden in self.overridden)

    def _line(self, key: str) -> int:
        """0 when no prefix of `key` stands in the file."""
        return next((self.lines[prefix] for prefix in _prefixes(key) if prefix in self.lines), 0)


def _prefixes(key: str) -> list[str]:
    """The key itself, then each of the sections that hold it, innermost first."""
    prefixes = []
    while key:
        prefixes.append(key)
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return prefixes
