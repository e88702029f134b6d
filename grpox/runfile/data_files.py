"""A look at a data file that costs little: its columns, the number of records, and lines that are none."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

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


def look_at(path: Path) -> DataFile:
    """The first record's columns and the number of records of a .jsonl, .json, .csv or .parquet file.

    Raises:
        UnreadableData: it holds no record, or what is none: its line is named. In a file that is too large to
            be counted only the first record is looked at.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    counted = path.stat().st_size <= COUNTED_UP_TO
    try:
        found = _text(path, counted)
    except UnicodeDecodeError as error:
        raise UnreadableData(f"is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UnreadableData(f"cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # nested, or with a number of digits, beyond Python's limits
        raise UnreadableData(f"cannot be read: {error}") from error
    if found.records == 0:
        raise UnreadableData("holds no record")
    return found


def _text(path: Path, counted: bool) -> DataFile:
    if path.suffix == ".csv":
        return _csv(path, counted)
    with path.open(encoding="utf-8-sig") as file:
        begins_with = next((line.lstrip()[0] for line in file if line.strip()), "")
    # A .json file may hold an array or one object a line: what loads it takes either.
    return _array(path) if path.suffix == ".json" and begins_with == "[" else _lines(path, counted)


def _lines(path: Path, counted: bool) -> DataFile:
    columns: tuple[str, ...] = ()
    records = 0
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            found = _columns(line.rstrip("\n"), f"line {number}")
            columns = columns if records else found
            records += 1
            if not counted:
                return DataFile(columns, None)
    return DataFile(columns, records)


def _columns(text: str, place: str) -> tuple[str, ...]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableData(f"{place} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UnreadableData(f"{place} is not an object with columns as keys")
    return tuple(record)


def _array(path: Path) -> DataFile:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UnreadableData(f"line {error.lineno} is not JSON: {error.msg}") from error
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise UnreadableData(f"record {number} (from 0) is not an object with columns as keys")
    return DataFile(tuple(records[0]) if records else (), len(records))


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


def _parquet(path: Path) -> DataFile:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UnreadableData(f"is not a parquet file: {' '.join(str(error).split())}") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableData(f"cannot be read: {' '.join(str(error).split())}") from error
    with parquet:
        if not parquet.metadata.num_rows:
            raise UnreadableData("holds no record")
        return DataFile(tuple(parquet.schema_arrow.names), parquet.metadata.num_rows)
