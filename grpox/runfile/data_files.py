"""A look at a data file that costs little: its columns, the number of records, and lines that are none."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from grpox.data.media import media_part
from grpox.errors import text_of

COUNTED_UP_TO = 32 * 2**20
"""Bytes of text up to which records are counted, which parses each of them."""


class UnreadableData(Exception):
    """The file does not hold what its suffix says, or holds nothing."""


@dataclass(frozen=True)
class DataFile:
    """What a look at a data file told."""

    columns: tuple[str, ...]
    """Of the first record."""
    records: int | None
    """None when the file is too large to count cheaply."""
    media: str = ""
    """Name the place of a prompt's image or the like: ``line 3 has a part of type image_url``."""


def look_at(path: Path, prompt_column: str = "") -> DataFile:
    """The first record's columns and the number of records of a .jsonl, .json, .csv or .parquet file.

    Args:
        prompt_column: where prompts are looked for that are more than text.

    Raises:
        UnreadableData: it holds no record, or what is none: its line is named. In a file that is too large to
            be counted only the first record is looked at.
    """
    if path.suffix == ".parquet":
        return _parquet(path, prompt_column)
    counted = path.stat().st_size <= COUNTED_UP_TO
    try:
        found = _text(path, counted, prompt_column)
    except UnicodeDecodeError as error:
        raise UnreadableData(f"is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UnreadableData(f"cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # nested, or with a number of digits, beyond Python's limits
        raise UnreadableData(f"cannot be read: {error}") from error
    if found.records == 0:
        raise UnreadableData("holds no record")
    return found


def _text(path: Path, counted: bool, prompt_column: str) -> DataFile:
    if path.suffix == ".csv":
        return _csv(path, counted)
    with path.open(encoding="utf-8-sig") as file:
        begins_with = next((line.lstrip()[0] for line in file if line.strip()), "")
    # A .json file may hold an array or one object a line: what loads it takes either.
    if path.suffix == ".json" and begins_with == "[":
        return _array(path, prompt_column)
    return _lines(path, counted, prompt_column)


def _lines(path: Path, counted: bool, prompt_column: str) -> DataFile:
    columns: tuple[str, ...] = ()
    records, media = 0, ""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            record = _record(line.rstrip("\n"), f"line {number}")
            columns = columns if records else tuple(record)
            media = media or _media(record, prompt_column, f"line {number}")
            records += 1
            if not counted:
                return DataFile(columns, None, media)
    return DataFile(columns, records, media)


def _media(record: dict[str, object], prompt_column: str, place: str) -> str:
    kind = media_part(record.get(prompt_column))
    return f"{place} has a part of type {kind}" if kind else ""


def _record(text: str, place: str) -> dict[str, object]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableData(f"{place} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UnreadableData(f"{place} is not an object with columns as keys")
    return record


def _array(path: Path, prompt_column: str) -> DataFile:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UnreadableData(f"line {error.lineno} is not JSON: {error.msg}") from error
    media = ""
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise UnreadableData(f"record {number} (from 0) is not an object with columns as keys")
        media = media or _media(record, prompt_column, f"record {number} (from 0)")
    return DataFile(tuple(records[0]) if records else (), len(records), media)


def _csv(path: Path, counted: bool) -> DataFile:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        try:
            columns = tuple(next(rows, []))
            if not counted:
                return DataFile(columns, None)
            return DataFile(columns, sum(1 for row in rows if _is_record(row, columns, rows.line_num)))
        except csv.Error as error:
            raise UnreadableData(f"line {rows.line_num} is not CSV: {error}") from error


def _is_record(row: list[str], columns: tuple[str, ...], line: int) -> bool:
    """Whether a line of a CSV file is no empty one; what is read as a record has a value for each column."""
    if row and len(row) != len(columns):
        raise UnreadableData(f"line {line} has {len(row)} values for {len(columns)} columns")
    return bool(row)


def _parquet(path: Path, prompt_column: str) -> DataFile:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UnreadableData(f"is not a parquet file: {' '.join(text_of(error).split())}") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableData(f"cannot be read: {' '.join(text_of(error).split())}") from error
    with parquet:
        if not parquet.metadata.num_rows:
            raise UnreadableData("holds no record")
        columns, media = parquet.schema_arrow, ""
        nested = prompt_column in columns.names and pyarrow.types.is_nested(columns.field(prompt_column).type)
        if nested and path.stat().st_size <= COUNTED_UP_TO:
            prompts = parquet.read([prompt_column]).column(prompt_column).to_pylist()
            rows = ({prompt_column: prompt} for prompt in prompts)
            told = (_media(row, prompt_column, f"row {number} (from 0)") for number, row in enumerate(rows))
            media = next(filter(None, told), "")
        return DataFile(tuple(columns.names), parquet.metadata.num_rows, media)
