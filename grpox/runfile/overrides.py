"""Command-line overrides of a run file, such as ``train.max_steps=10``, and the source line of each key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem, join
from grpox.runfile.slots import default_name, is_slot
from grpox.runfile.yaml_lines import DEEPEST, read_yaml

COMMAND_LINE = "command line"
"""`where` of a problem with an override."""
ARGUMENT = "Run()"
"""`where` of a problem with an argument of `grpox.train`."""


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set each ``dotted.key=value`` in `data`, in order; a later one wins.

    The value is YAML. ``rewards.0.weight=2`` and ``rewards[0].weight=2`` set list entries, and the index one
    past the end appends. ``loss.clip_high=0.28`` turns ``loss: dapo`` into a mapping of name and parameters.

    Returns:
        the dotted keys that were set.

    Raises:
        ConfigError: an override lacks ``=``, has a value that is not YAML, or sets a key below a value without
            keys; lists all.
    """
    keys, problems = [], []
    for override in overrides:
        try:
            keys.append(_apply(data, override))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return keys


def _apply(data: dict[str, Any], override: str) -> str:
    name, equals, text = override.partition("=")
    parts = re.sub(r"\[(\d+)\]", r".\1", name.strip()).split(".")
    path = [int(part) if part.isdecimal() else part for part in parts]
    if not (equals and all(parts)):
        what = "an override has the form key=value" if all(parts) else "an override needs a key before '='"
        raise ConfigError(what, where=COMMAND_LINE, given=override, allowed="for example train.max_steps=10")
    if len(path) > DEEPEST:
        raise ConfigError("lists or mappings are nested too deeply", where=COMMAND_LINE, given=override)
    key = reduce(join, path, "")
    try:
        value = read_yaml(text, COMMAND_LINE).data
    except ConfigError as error:
        raise ConfigError(error.problems[0].what, key, COMMAND_LINE, text) from error
    _set(data, path, value)
    return key


def _set(data: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    container: Any = data
    key = ""
    for part in path[:-1]:
        key = join(key, part)
        place = _place(container, part, key)
        inner = container[place]
        if is_slot(key) and (isinstance(inner, str) or inner is None):
            name = inner or default_name(key)
            container[place] = {"name": name} if name else {}
        elif inner is None:
            container[place] = {}
        elif not isinstance(inner, dict | list):
            raise ConfigError("has a value, so no keys can be below it", key, COMMAND_LINE, str(inner))
        container = container[place]
    container[_place(container, path[-1], join(key, path[-1]))] = value


def _place(container: Any, part: str | int, key: str) -> str | int:
    """Return the key or index of `part`, adding null if there is no value yet."""
    if isinstance(container, dict):
        container.setdefault(str(part), None)
        return str(part)
    if part == len(container):
        container.append(None)
    if isinstance(part, int) and part < len(container):
        return part
    allowed = f"an index from 0 to {len(container)}, the last of which appends"
    raise ConfigError("no such entry of the list", key, COMMAND_LINE, str(part), allowed)


@dataclass(frozen=True)
class Origin:
    """Source of each dotted key, such as ``rewards[0].weight``: a line or an override."""

    source: str
    """Name of the run file in problems."""
    folder: Path
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: Sequence[str] = ()
    arguments: Collection[str] = ()
    """Keys whose value comes from an argument of `grpox.train`."""

    def where(self, key: str) -> str:
        """Return ``run.yaml:12``, ``command line`` or ``Run()``, by the longest known prefix of `key`."""
        prefixes = _prefixes(key)
        if any(prefix in self.arguments for prefix in prefixes):
            return ARGUMENT
        # An override replaces everything that the file has below its key.
        if any(prefix in self.overridden for prefix in prefixes):
            return COMMAND_LINE
        for prefix in prefixes:
            if prefix in self.lines:
                return f"{self.source}:{self.lines[prefix]}"
            # An override set a key below this one, which the file lacks.
            if any(prefix in _prefixes(overridden) for overridden in self.overridden):
                return COMMAND_LINE
        return self.source

    def base(self, key: str) -> Path:
        """Return the folder against which a relative path under `key` resolves."""
        return Path.cwd() if self.where(key) in (COMMAND_LINE, ARGUMENT) else self.folder

    def place(self, problems: Iterable[Problem]) -> list[Problem]:
        """Sort problems by line, fill in `where`, and write indices as in ``rewards[0]``."""
        placed = []
        for problem in problems:
            key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", problem.key)
            placed.append(replace(problem, key=key, where=problem.where or self.where(key)))
        return sorted(placed, key=lambda problem: (problem.where == COMMAND_LINE, self._line(problem.key)))

    def _line(self, key: str) -> int:
        """Return the line of the longest prefix of `key` in the file, 0 if there is none."""
        return next((self.lines[prefix] for prefix in _prefixes(key) if prefix in self.lines), 0)


def _prefixes(key: str) -> list[str]:
    """List the key itself, then the sections around it, innermost first."""
    prefixes = []
    while key:
        prefixes.append(key)
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return prefixes
