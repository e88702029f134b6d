"""A run file in the making: its values, what is to be filled in, what became of each field, and its text."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpox.config import RunConfig, Section
from grpox.errors import Problem, nearest, plain
from grpox.runfile.from_trl.fields import FIELDS, Verdict, parameters_of
from grpox.runfile.from_trl.setup import Setup
from grpox.runfile.yaml_lines import Dumper

TRL_DEFAULT = "TRL's default"
WIDTH = 110


@dataclass(frozen=True)
class Row:
    """What became of one thing that TRL was given."""

    name: str
    given: str
    line: int | None
    verdict: Verdict
    message: str

    @property
    def is_lost(self) -> bool:
        return self.verdict in (Verdict.UNSUPPORTED, Verdict.UNKNOWN)


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

    def has(self, *names: str) -> bool:
        """Return True where one of the fields was given, and not None."""
        given = [self.setup.fields[name] for name in names if name in self.setup.fields]
        return any(one.literal and one.value is not None for one in given)

    def unread(self, name: str) -> bool:
        """Whether the field was given something that is no literal."""
        return name in self.setup.fields and not self.setup.fields[name].literal

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key of the run file."""
        held = self.values
        *sections, last = key.split(".")
        for section in sections:
            held = held.setdefault(section, {})
        held[last] = value
        if comment:
            self.comments[key] = comment

    def put_component(self, key: str, name: str, parameters: dict[str, Any], comment: str = "") -> None:
        """Set a component in the shortest form that a run file has for it."""
        self.put(key, {"name": name, **parameters} if parameters else name, comment)

    def copy(self, *names: str) -> None:
        """Put each of the fields that was given under its key."""
        for name in names:
            if self.has(name):
                self.put(FIELDS[name].key, self.get(name))

    def default_of(self, *names: str) -> str:
        """The comment of what follows from TRL's default, empty where one of the fields was given."""
        return "" if self.has(*names) else TRL_DEFAULT

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

    def unneeded(self, names: str | tuple[str, ...], why: str) -> None:
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
        return text.startswith((".", "/", "~")) or os.path.exists(self.setup.home / text)


def whole(number: float) -> float:
    """An int where `number` is one, as YAML and run files write it."""
    return int(number) if float(number).is_integer() else number


def run_file_text(draft: Draft) -> str:
    """The whole file: values, comments, and commented lines for what is to be filled in."""
    lines = [f"# From {plain(draft.setup.source)}, a set-up for TRL's GRPOTrainer, by `grpox import-trl`."]
    lost = [row for row in draft.rows if row.is_lost]
    lines += ["# Not carried over:"] if lost else []
    for row in lost:
        lines += _comment(f"{row.name} {plain(row.given, 60)}: {row.message}", "#   ")
    for key in RunConfig.model_fields:
        lines += _block(draft, key)
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.dump(
        [value], Dumper=Dumper, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True
    )
    return text.strip()[1:-1]


def _block(draft: Draft, key: str) -> Iterator[str]:
    """The lines of a top-level key: of a section and of rewards, one a value; else one."""
    value = draft.values.get(key)
    blanks = [blank for blank in draft.blanks if re.split(r"[.[]", blank.key)[0] == key]
    kind = RunConfig.model_fields[key].annotation
    if isinstance(kind, type) and issubclass(kind, Section) and (value or key in ("model", "data")):
        yield f"{key}:"
        for name, part in (value or {}).items():
            yield _line(f"  {name}: {inline(part)}", draft.comments.get(f"{key}.{name}", ""))
        for blank in blanks:
            yield from _blank(blank, "  ", f"{blank.key.partition('.')[2]}:")
    elif key == "rewards":
        yield "rewards:" if value else "# rewards:"
        yield from (f"  - {inline(entry)}" for entry in value or ())
        for blank in blanks:
            yield from _blank(blank, "  ", "-" if blank.key == "rewards" else f"{blank.key}:")
    else:
        for blank in blanks:
            yield from _blank(blank, "", f"{blank.key}:")
        if value is not None:
            yield _line(f"{key}: {inline(value)}", draft.comments.get(key, ""))


def _blank(blank: Blank, indent: str, name: str) -> Iterator[str]:
    """What is to be filled in, and above it why."""
    yield from _comment(blank.why, f"{indent}# ")
    yield f"{indent}# {name} {plain(blank.example)}"


def _comment(text: str, prefix: str) -> list[str]:
    return textwrap.wrap(
        plain(text, 400), WIDTH, initial_indent=prefix, subsequent_indent=f"{prefix}  ", break_long_words=False
    )


def _line(text: str, comment: str) -> str:
    return f"{text}  # {plain(comment, WIDTH)}" if comment else text
