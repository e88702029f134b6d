"""Cheap check of a data file: columns, number of records, and lines that are not records."""

from __future__ import annotations

import csv
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpox.data.json_rows import LOOKED_AT, Columns, UnreadableData, json_rows, translate_errors
from grpox.errors import text_of


@dataclass(frozen=True)
class DataFile:
    """Columns and records of a data file."""

    columns: tuple[str, ...]
    """Columns of the checked records."""
    records: int | None
    """Number of records, None if the file is too large to count cheaply."""


def look_at(path: Path) -> DataFile:
    """Read the columns and count the records of a .jsonl, .json, .csv or .parquet file.

    Raises:
        UnreadableData: the file has no record, an invalid record, or a column with several types; the message
            names the line. Only the first 32 MiB of a larger file are read; of a larger .csv only the columns.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    with translate_errors():
        counted = path.stat().st_size <= LOOKED_AT
        file = (_csv if path.suffix == ".csv" else _json)(path, counted)
    if file.records == 0:
        raise UnreadableData("has no record")
    return file


def first_value(path: Path, column: str) -> object:
    """Return the value of a column in the first row of a file; None if it cannot be read, which others tell."""
    with suppress(
        OSError, ValueError, LookupError, NotImplementedError, StopIteration, csv.Error, UnreadableData
    ):
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return next(pyarrow.parquet.ParquetFile(path).iter_batches(1, columns=[column]))[0][0].as_py()
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                return next(csv.DictReader(file))[column]
        return next(json_rows(path, LOOKED_AT))[1].get(column)
    return None


def _json(path: Path, counted: bool) -> DataFile:
    columns, records = Columns(), 0
    for place, row in json_rows(path, None if counted else LOOKED_AT):
        columns.add(place, row)
        records += 1
    return DataFile(columns.names, records if counted else None)


def _csv(path: Path, counted: bool) -> DataFile:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        try:
            columns = tuple(next(rows, []))
            records = 0
            for row in rows if counted else ():
                if row and len(row) != len(columns):
                    message = f"line {rows.line_num} has {len(row)} values for {len(columns)} columns"
                    raise UnreadableData(message)
                records += bool(row)  # an empty line is not a record
            return DataFile(columns, records if counted else None)
        except csv.Error as error:
            raise UnreadableData(f"line {rows.line_num} is not CSV: {error}") from error


def _parquet(path: Path) -> DataFile:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            names, records = parquet.schema_arrow.names, parquet.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        what = "is not a parquet file" if isinstance(error, pyarrow.ArrowInvalid) else "cannot be read"
        raise UnreadableData(f"{what}: {' '.join(text_of(error).split())}") from error
    if not records:
        raise UnreadableData("has no record")
    return DataFile(tuple(names), records)
