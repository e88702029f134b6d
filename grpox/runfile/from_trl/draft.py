"""A run file in the making: its values, what is to be filled in, and what became of each field."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.config import RunConfig, Section
from grpox.errors import Problem, nearest
from grpox.runfile.from_trl.fields import FIELDS, Verdict, parameters_of
from grpox.runfile.from_trl.setup import Setup

TRL_DEFAULT = "TRL's default"


@dataclass(frozen=True)
class Row:
    """What became of one thing that TRL was given."""

    name: str
    given: str
    line: int | None
    verdict: Verdict
    message: str


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
        self.explained: dict[str, tuple[Verdict, str]] = {}
        """Field -> what became of it, where that is not what its table says."""
        for name, field in FIELDS.items():
            if field.needs and not self.get(field.needs):
                why = "was not read" if self.unread(field.needs) else "is false"
                self.unneeded((name,), f"{field.needs} {why}")

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

    def copy(self, *names: str) -> None:
        """Put each of the fields that was given under its key."""
        for name in names:
            if self.has(name):
                self.put(FIELDS[name].key, self.get(name))

    def given_of(self, *components: str) -> dict[str, Any]:
        """The parameters of a component, by our names, that were given."""
        names = parameters_of(*components)
        return {FIELDS[name].key.rpartition(".")[2]: self.get(name) for name in names if self.has(name)}

    def chosen(self, name: str, allowed: tuple[str, ...]) -> str:
        """The value of a field that is one of several words; any other is refused."""
        value = self.get(name)
        if value not in allowed:
            self.refuse(name, f"no such {name}", ", ".join(allowed), nearest(str(value), allowed))
            return allowed[0]
        return str(value)

    def mapping(self, name: str, allowed: str) -> dict[str, Any]:
        """The value of a field that is a mapping, or empty; any other is refused."""
        value = self.get(name) or {}
        if isinstance(value, dict):
            return value
        self.refuse(name, "is no mapping", allowed)
        return {}

    def ask(self, key: str, example: str, why: str) -> None:
        """Leave a key to the user."""
        self.blanks.append(Blank(key, example, why))

    def explain(self, names: str | tuple[str, ...], verdict: Verdict, message: str) -> None:
        """Say what became of fields, where that is not what their table says."""
        for name in (names,) if isinstance(names, str) else names:
            if name in self.setup.fields:
                self.explained[name] = verdict, message

    def unneeded(self, names: tuple[str, ...], why: str) -> None:
        """Say of fields that they do nothing in this set-up."""
        self.explain(names, Verdict.NOT_NEEDED, why)

    def refuse(self, name: str, what: str, allowed: str, closest: str = "") -> None:
        """Refuse a value that TRL would not take either."""
        given = self.setup.fields[name]
        where = self.setup.source if given.line is None else f"{self.setup.source}:{given.line}"
        self.problems.append(Problem(what, name, where, given.shown, allowed, closest))

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
    section, name, *_ = *key.split("."), ""
    field = RunConfig.model_fields[section]
    kind = field.annotation
    if name and isinstance(kind, type) and issubclass(kind, Section):
        field = kind.model_fields[name]
    return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def component(name: str, parameters: dict[str, Any]) -> Any:
    """A component in the shortest form that a run file has for it."""
    return {"name": name, **parameters} if parameters else name
