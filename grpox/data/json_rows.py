"""Rows of .jsonl and .json files exactly as JSON says: no value takes another type on the way in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LOOKED_AT = 32 * 2**20
"""Characters of a file that are looked at where not all of it is."""

_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class UnreadableData(Exception):
    """A file does not hold what its suffix says, or holds nothing."""


def json_rows(path: Path, characters: int | None = None) -> Iterator[tuple[str, Row]]:
    """The records of a .jsonl or .json file, each with its place in words: ``line 3``.

    A .json file holds an array of objects, or like a .jsonl file one object a line; empty lines are no records.

    Args:
        characters: no further record is read after as many; None: all are. An array is read whole.

    Raises:
        UnreadableData: the file cannot be read, or holds what is no record or one with a key twice; its place
            is named.
    """
    with translate_errors(), path.open(encoding="utf-8-sig") as file:
        begins_with = next((line.lstrip()[0] for line in file if line.strip()), "")
        file.seek(0)
        if path.suffix == ".json" and begins_with == "[":
            yield from _of_array(file.read())
        else:
            yield from _of_lines(file, characters)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise UnreadableData for what goes wrong where a file of text is read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnreadableData(f"is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UnreadableData(f"cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # nested, or with a number of digits, beyond Python's limits
        raise UnreadableData(f"cannot be read: {error}") from error


def _of_lines(lines: Iterable[str], characters: int | None) -> Iterator[tuple[str, Row]]:
    read = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            record = _parsed(line.rstrip("\n"), place)
        except json.JSONDecodeError as error:
            raise UnreadableData(f"{place} is not JSON: {error.msg} at column {error.colno}") from error
        yield place, _as_row(record, place)
        read += len(line)
        if characters is not None and read > characters:
            return


def _of_array(text: str) -> Iterator[tuple[str, Row]]:
    try:
        records = _parsed(text, "a record")
    except json.JSONDecodeError as error:
        raise UnreadableData(f"line {error.lineno} is not JSON: {error.msg}") from error
    for number, record in enumerate(records):
        place = f"record {number} (from 0)"
        yield place, _as_row(record, place)


def _as_row(record: Any, place: str) -> Row:
    if not isinstance(record, dict):
        raise UnreadableData(f"{place} is not an object with columns as keys")
    return record


def _parsed(text: str, place: str) -> Any:
    """Parse JSON in which no object has a key twice: it does not say which value counts."""

    def without_repeated_keys(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            keys = [key for key, _ in pairs]
            key = json.dumps(next(key for key in keys if keys.count(key) > 1))
            raise UnreadableData(f"{place} has the key {key} twice")
        return row

    return json.loads(text, object_pairs_hook=without_repeated_keys)


class Columns:
    """The columns of rows, in the order in which they first occur, and the one type that each has.

    Types are those of JSON: string, number, boolean, array, object; null goes with each of them.

    Args:
        known: all columns that there may be; None: those of any row.
    """

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self._open = known is None
        self._seen: dict[str, tuple[str, str]] = dict.fromkeys(known or (), ("", ""))
        """Name -> its type, and the value with its place that told so."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns so far."""
        return tuple(self._seen)

    def add(self, place: str, row: Row) -> None:
        """Take note of a row, and of its `place` in words.

        Raises:
            UnreadableData: a column has another type here than in a row before, or is none of those known.
        """
        for name, value in row.items():
            if name not in self._seen and not self._open:
                raise UnreadableData(f"{place} has a column that the stream's first 32 MiB lack: {name}")
            kind = "" if value is None else _TYPES[type(value)]
            before, seen_at = self._seen.setdefault(name, ("", ""))
            if kind and not before:
                self._seen[name] = kind, f"{place}: {_brief(value)}"
            elif kind and kind != before:
                now = f"{kind} in {place}: {_brief(value)}"
                raise UnreadableData(f"column {name} has several types: {before} in {seen_at}, and {now}")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
