"""Draft of a run file: its values, blanks to fill in, the outcome of each setting, and its text."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.config import RunConfig, Section
from grpox.errors import Problem, plain
from grpox.errors.algorithm_names import nearest_algorithm
from grpox.runfile.from_trl.fields import FIELDS, Verdict, parameters_of
from grpox.runfile.from_trl.setup import Reference, Setup, TrlData, TrlValue
from grpox.runfile.yaml_lines import inline

TRL_DEFAULT = "TRL's default"
STATEMENT = "statement"
"""Name of the rows of statements that are neither a field nor an argument."""
WIDTH = 110


@dataclass(frozen=True)
class Row:
    """Outcome of one TRL setting."""

    name: str
    given: TrlValue | Reference | TrlData
    verdict: Verdict
    message: str

    @property
    def is_lost(self) -> bool:
        return self.verdict in (Verdict.UNSUPPORTED, Verdict.UNKNOWN)


@dataclass(frozen=True)
class Blank:
    """A line for the user to fill in."""

    key: str
    """Dotted key."""
    example: str
    """Value in YAML."""
    why: str


class Draft:
    """The state of a conversion: TRL's settings, and the run file so far."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """
        Args:
            folder: folder of the run file, against which its relative paths resolve.
        """
        self.setup = setup
        self.values: dict[str, Any] = {}
        """Top-level key -> value, a mapping for a section."""
        self.comments: dict[str, str] = {}
        """Dotted key -> comment beside the key."""
        self.blanks: list[Blank] = []
        self.rows: list[Row] = []
        self.problems: list[Problem] = []
        self._folder = folder
        self.explained: dict[str, tuple[Verdict, str]] = {}
        """Field -> outcome that replaces the outcome in fields.yaml."""
        for name, field in FIELDS.items():
            if field.needs and not self.get(field.needs):
                why = "was not read" if self.unread(field.needs) else "is false"
                self.unneeded((name,), f"{field.needs} {why}")

    def outcomes(self) -> dict[str, list[dict[str, Any]]]:
        """List what is carried over, what differs and what is not carried, each with line, text and reason."""
        listed: dict[str, list[dict[str, Any]]] = {"carried": [], "differs": [], "not_carried": []}
        for row in self.rows:
            text = row.given.shown if row.name == STATEMENT else f"{row.name}={row.given.shown}".rstrip("=")
            key = {Verdict.DIFFERS: "differs", Verdict.UNREAD: "not_carried"}.get(row.verdict, "carried")
            entry = {"line": row.given.line, "text": text, "reason": row.message}
            listed["not_carried" if row.is_lost else key].append(entry)
        return listed

    def get(self, name: str) -> Any:
        """Return the value of a field, or TRL's default; a mapping may be written as JSON."""
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
        """Return True if one of the fields was given and is not None."""
        given = [self.setup.fields[name] for name in names if name in self.setup.fields]
        return any(one.literal and one.value is not None for one in given)

    def unread(self, name: str) -> bool:
        """Return True if the field's value is not a literal."""
        return name in self.setup.fields and not self.setup.fields[name].literal

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key of the run file."""
        parent = self.values
        *sections, last = key.split(".")
        for section in sections:
            parent = parent.setdefault(section, {})
        parent[last] = value
        if comment:
            self.comments[key] = comment

    def put_component(self, key: str, name: str, parameters: dict[str, Any], comment: str = "") -> None:
        """Set a component in its shortest form."""
        self.put(key, {"name": name, **parameters} if parameters else name, comment)

    def copy(self, *names: str) -> None:
        """Write the given fields under their keys."""
        for name in names:
            if self.has(name):
                self.put(FIELDS[name].key, self.get(name))

    def default_of(self, *names: str) -> str:
        """Return the comment for a TRL default, empty if one of the fields was given."""
        return "" if self.has(*names) else TRL_DEFAULT

    def given_of(self, *components: str) -> dict[str, Any]:
        """Return the given parameters of a component, by grpox's names."""
        names = parameters_of(*components)
        return {FIELDS[name].key.rpartition(".")[2]: self.get(name) for name in names if self.has(name)}

    def chosen(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return the value of a field that must be one of `allowed`; refuse any other value."""
        value = self.get(name)
        if value not in allowed:
            near = nearest_algorithm(str(value), allowed)
            self.refuse(name, f"no such {name}", ", ".join(allowed), near)
            return allowed[0]
        return str(value)

    def mapping(self, name: str, allowed: str) -> dict[str, Any]:
        """Return the value of a field that must be a mapping or empty; refuse any other value."""
        value = self.get(name) or {}
        if isinstance(value, dict):
            return value
        self.refuse(name, "is not a mapping", allowed)
        return {}

    def ask(self, key: str, example: str, why: str) -> str:
        """Add a blank for a key that the user has to fill in, and return `why`."""
        self.blanks.append(Blank(key, example, why))
        return why

    def report(self, name: str, given: TrlValue | Reference | TrlData, verdict: Verdict, message: str) -> None:
        """Add a row for a setting."""
        self.rows.append(Row(name, given, verdict, message))

    def explain(self, names: str | tuple[str, ...], verdict: Verdict, message: str) -> None:
        """Replace the outcome of fields from fields.yaml."""
        for name in (names,) if isinstance(names, str) else names:
            if name in self.setup.fields:
                self.explained[name] = verdict, message

    def unneeded(self, names: str | tuple[str, ...], why: str) -> None:
        """Report that fields have no effect in this setup."""
        self.explain(names, Verdict.NOT_NEEDED, why)

    def refuse(self, name: str, what: str, allowed: str, closest: str = "") -> None:
        """Refuse a value that TRL would also refuse."""
        given = self.setup.fields[name]
        where = self.setup.source if given.line is None else f"{self.setup.source}:{given.line}"
        self.problems.append(Problem(what, name, where, given.shown, allowed, closest))

    def path(self, path: str) -> str:
        """Change a path relative to TRL's working directory to a path relative to the run file."""
        known = Path(path).expanduser()
        return path if known.is_absolute() else os.path.relpath(self.setup.home / known, self._folder)

    def is_path(self, text: str) -> bool:
        """Return True if `text` is a path, not a hub id."""
        return text.startswith((".", "/", "~")) or os.path.exists(self.setup.home / text)


def whole(number: float) -> float:
    """Convert a whole number to an int, as YAML and run files write it."""
    return int(number) if float(number).is_integer() else number


def run_file_text(draft: Draft) -> str:
    """Write the whole file: values, comments, and commented lines for the blanks."""
    lines = [
        f"# Converted by `grpox import-trl` from {plain(draft.setup.source)}, written for TRL's GRPOTrainer."
    ]
    lost = [row for row in draft.rows if row.is_lost]
    lines += ["# Not carried over:"] if lost else []
    for row in lost:
        name = f"line {row.given.line}:" if row.name == STATEMENT else row.name
        lines += _comment(f"{name} {plain(row.given.shown, 60)}: {row.message}", "#   ")
    for key in RunConfig.model_fields:
        lines += _block(draft, key)
    return "\n".join(lines) + "\n"


def _block(draft: Draft, key: str) -> Iterator[str]:
    """Write a top-level key: one line for each value of a section or of rewards, else one line."""

    def beside(name: str) -> str:
        return f"  # {plain(draft.comments[name], WIDTH)}" if name in draft.comments else ""

    value = draft.values.get(key)
    blanks = [blank for blank in draft.blanks if re.split(r"[.[]", blank.key)[0] == key]
    kind = RunConfig.model_fields[key].annotation
    if isinstance(kind, type) and issubclass(kind, Section) and (value or key in ("model", "data")):
        yield f"{key}:"
        for name, part in (value or {}).items():
            yield f"  {name}: {inline(part)}{beside(f'{key}.{name}')}"
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
            yield f"{key}: {inline(value)}{beside(key)}"


def _blank(blank: Blank, indent: str, name: str) -> Iterator[str]:
    """Write the reason for a blank, and the blank below it."""
    yield from _comment(blank.why, f"{indent}# ")
    yield f"{indent}# {name} {plain(blank.example)}"


def _comment(text: str, prefix: str) -> list[str]:
    return textwrap.wrap(
        plain(text, 400), WIDTH, initial_indent=prefix, subsequent_indent=f"{prefix}  ", break_long_words=False
    )
