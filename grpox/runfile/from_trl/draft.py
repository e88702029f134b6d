"""A run file in the making: its values, what is to be filled in, and what became of each field."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.config import RunConfig, Section
from grpox.errors import Problem
from grpox.runfile.from_trl.field import Verdict
from grpox.runfile.from_trl.names import FIELDS
from grpox.runfile.from_trl.setup import Given, Setup

TRL_DEFAULT = "TRL's default"


@dataclass(frozen=True)
class Row:
    """What became of one thing that TRL was given."""

    name: str
    given: str
    line: int | None
    verdict: Verdict
    told: str


@dataclass(frozen=True)
class Blank:
    """A line that is left for the user."""

    key: str
    """Dotted key."""
    example: str
    """A value in YAML."""
    why: str


class Draft:
    """What the parts of a conversion write to, and ask for what TRL was given."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """
        Args:
            folder: in which the run file will stand; its relative paths start there.
        """
        self.setup = setup
        self.values: dict[str, Any] = {}
        """Top-level key -> value; of a section, a mapping."""
        self.comments: dict[str, str] = {}
        """Dotted key -> what stands beside it."""
        self.blanks: list[Blank] = []
        self.rows: list[Row] = []
        self.problems: list[Problem] = []
        self._folder = folder
        self._told: dict[str, tuple[Verdict, str]] = {}

    def get(self, name: str) -> Any:
        """What the field `name` has in TRL: as given, or its default. Mappings may be given as JSON."""
        given = self.setup.fields.get(name)
        if given is None or not given.literal:
            return FIELDS[name].default
        if isinstance(given.value, str) and given.value.lstrip().startswith("{"):
            try:
                return json.loads(given.value)
            except ValueError:
                return given.value
        return given.value

    def has(self, name: str) -> bool:
        """Whether the field was given, and not None."""
        given = self.setup.fields.get(name)
        return given is not None and given.literal and given.value is not None

    def unread(self, name: str) -> bool:
        """Whether the field was given something that is no literal."""
        given = self.setup.fields.get(name)
        return given is not None and not given.literal

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key of the run file."""
        section, _, rest = key.partition(".")
        if not rest:
            self.values[key] = value
        else:
            held = self.values.setdefault(section, {})
            *inner, last = rest.split(".")
            for part in inner:
                held = held.setdefault(part, {})
            held[last] = value
        if comment:
            self.comments[key] = comment

    def put_from(self, name: str, key: str, value: Any, ours: Any) -> None:
        """Set `key` from the field `name`, if it was given or if TRL's default is not `ours`."""
        if self.has(name):
            self.put(key, value)
        elif value != ours:
            self.put(key, value, TRL_DEFAULT)

    def ask(self, key: str, example: str, why: str) -> None:
        """Leave a key to the user."""
        self.blanks.append(Blank(key, example, why))

    def tell(self, name: str, verdict: Verdict, told: str) -> None:
        """What became of the field `name`, where that is not what its table says."""
        if name in self.setup.fields:
            self._told[name] = verdict, told

    def unneeded(self, names: tuple[str, ...], why: str) -> None:
        """Fields that do nothing in this set-up."""
        for name in names:
            self.tell(name, Verdict.NOT_NEEDED, why)

    def told(self, name: str) -> tuple[Verdict, str] | None:
        """What `tell` was told of a field."""
        return self._told.get(name)

    def row(self, name: str, given: Given | str, line: int | None, verdict: Verdict, told: str) -> None:
        """Add what became of something else than a field."""
        shown = given.shown if isinstance(given, Given) else given
        self.rows.append(Row(name, shown, line, verdict, told))

    def refuse(self, name: str, what: str, allowed: str, nearest: str = "") -> None:
        """A value that TRL would not take either."""
        given = self.setup.fields[name]
        where = self.setup.source if given.line is None else f"{self.setup.source}:{given.line}"
        self.problems.append(Problem(what, name, where, given.shown, allowed, nearest))

    def path(self, path: str) -> str:
        """A path that starts in TRL's working directory, as one that starts beside the run file."""
        known = Path(path).expanduser()
        return path if known.is_absolute() else os.path.relpath(self.setup.home / known, self._folder)

    def is_path(self, text: str) -> bool:
        """Whether this names something on disk rather than on the hub."""
        try:
            return text.startswith((".", "/", "~")) or (self.setup.home / text).exists()
        except OSError:  # longer than a name can be
            return False


def whole(number: float) -> float:
    """An int where `number` is one, as YAML and run files write it."""
    return int(number) if float(number).is_integer() else number


def our_default(key: str) -> Any:
    """The default of a key of the core, None where it has none."""
    section, _, name = key.partition(".")
    field = RunConfig.model_fields[section]
    kind = field.annotation
    if name and isinstance(kind, type) and issubclass(kind, Section):
        field = kind.model_fields[name]
    return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
