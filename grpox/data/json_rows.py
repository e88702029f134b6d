"""Rows of .jsonl and .json files, without changing the type of any value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LOOKED_AT = 32 * 2**20
"""Number of characters that are read if only the beginning of a file is checked."""

_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class UnreadableData(Exception):
    """Raised if a file's content does not match its suffix, or if the file is empty."""


def json_rows(path: Path, characters: int | None = None) -> Iterator[tuple[str, Row]]:
    """Yield the records of a .jsonl or .json file, each with its place in words: ``line 3``.

    A .json file is an array of objects, or has one object per line like a .jsonl file; empty lines are skipped.

    Args:
        characters: number of characters after which no further record is read; None: read all. An array is
            always read whole.

    Raises:
        UnreadableData: the file cannot be read, or has an invalid record or a record with a key twice; the
            message names its place.
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
    """Raise UnreadableData for errors while a text file is read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnreadableData(f"is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UnreadableData(f"cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # nesting or number of digits beyond Python's limits
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
    """Parse JSON; refuse objects that have a key twice, because it is unclear which value applies."""

    def without_repeated_keys(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            keys = [key for key, _ in pairs]
            key = json.dumps(next(key for key in keys if keys.count(key) > 1))
            raise UnreadableData(f"{place} has the key {key} twice")
        return row

    return json.loads(text, object_pairs_hook=without_repeated_keys)


class Columns:
    """Columns of rows in the order of their first occurrence, each with one type.

    Types are JSON's: string, number, boolean, array, object; null is valid in every column.

    Args:
        known: all allowed columns; None: any column is allowed.
    """

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self._open = known is None
        self._seen: dict[str, tuple[str, str]] = dict.fromkeys(known or (), ("", ""))
        """Name -> type, and the value and place that showed the type."""

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of all rows so far."""
        return tuple(self._seen)

    def add(self, place: str, row: Row) -> None:
        """Record a row and its `place` in words.

        Raises:
            UnreadableData: a column has a different type than in an earlier row, or is not a known column.
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
