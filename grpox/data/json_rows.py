"""Rows of .jsonl and .json files, with exactly the values in the file; also as a dataset.

The reader of `datasets` gives each column one type: beside a number, "007" becomes 7, an integer beyond 64 bits
becomes a float, and an object gets the keys of other rows. A dataset of this module therefore stores each value
as JSON text and parses the text when the value is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

LOOKED_AT = 32 * 2**20
"""Number of characters that are read if only the beginning of a file is checked."""
_STORED_AS = "JSON text by column, 1"
"""Part of the cache name in `datasets`; it must change when the storage format changes."""

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


def json_rows(path: Path, characters: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _of_lines(lines: Iterable[str], characters: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    read = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            record = _parsed(line.rstrip("\n"), place)
        except json.JSONDecodeError as error:
            raise UnreadableData(f"{place} is not JSON: {error.msg} at column {error.colno}") from error
        yield place, _object(record, place)
        read += len(line)
        if characters is not None and read > characters:
            return


def _of_array(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        records = _parsed(text, "a record")
    except json.JSONDecodeError as error:
        raise UnreadableData(f"line {error.lineno} is not JSON: {error.msg}") from error
    for number, record in enumerate(records):
        place = f"record {number} (from 0)"
        yield place, _object(record, place)


def _object(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UnreadableData(f"{place} is not an object with columns as keys")
    return record


def _parsed(text: str, place: str) -> Any:
    """Parse JSON; refuse objects that have a key twice, because it is unclear which value applies."""

    def without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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

    def add(self, place: str, row: dict[str, Any]) -> None:
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


def open_json(path: Path, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    """Open the rows of a file; a column that a row lacks is None in that row.

    Args:
        streaming: return an IterableDataset, with the columns of the file's first 32 MiB.

    Raises:
        UnreadableData: see `json_rows` and `Columns`; or no record has a column. Errors beyond the first part
            of a stream are raised when it is read.
    """
    import datasets

    columns = Columns()
    for place, row in json_rows(path, LOOKED_AT if streaming else None):
        columns.add(place, row)
    if not columns.names:
        raise UnreadableData("has no record with a column")
    given: dict[str, Any] = {"path": str(path), "names": columns.names}
    if streaming:
        return datasets.IterableDataset.from_generator(_streamed, gen_kwargs=given)
    about = path.stat()
    version = (str(path), about.st_size, about.st_mtime_ns, columns.names, _STORED_AS)
    rows = datasets.Dataset.from_generator(
        _stored,
        features=datasets.Features(dict.fromkeys(columns.names, datasets.Value("large_string"))),
        gen_kwargs=given,
        fingerprint=hashlib.sha256(repr(version).encode()).hexdigest()[:16],
    )
    return rows.with_transform(_values)


def _streamed(path: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    columns = Columns(names)
    for place, row in json_rows(Path(path)):
        columns.add(place, row)
        yield {name: row.get(name) for name in names}


def _stored(path: str, names: Sequence[str]) -> Iterator[dict[str, str | None]]:
    for _, row in json_rows(Path(path)):
        yield {name: None if row.get(name) is None else json.dumps(row[name]) for name in names}


def _values(columns: dict[str, list[str | None]]) -> dict[str, list[Any]]:
    return {
        name: [None if text is None else json.loads(text) for text in texts] for name, texts in columns.items()
    }
