"""Cheap check of a data file: columns, number of records, and lines that are not records."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpox.data.json_rows import LOOKED_AT, Columns, Row, UnreadableData, json_rows, translate_errors
from grpox.data.unusable_columns import media_part
from grpox.errors import Problem, text_of


@dataclass(frozen=True)
class RowCheck:
    """A check of each row of a file."""

    columns: Collection[str]
    """Columns that it reads."""
    find: Callable[[Row, str], Problem | None]
    """Finds the problem with a row, which the second argument names: ``line 3``."""


@dataclass(frozen=True)
class DataFile:
    """Columns and records of a data file, with the places of missing or unusable prompts."""

    columns: tuple[str, ...]
    """Columns of the checked records."""
    records: int | None
    """Number of records, None if the file is too large to count cheaply."""
    without_prompt: str = ""
    """Place of the first record without a prompt, in a .jsonl or .json file."""
    media: str = ""
    """Place of an image, sound or video in a prompt: ``line 3 has a part of type image_url``."""
    misfit: Problem | None = None
    """Problem of the first row that the check refuses, in a .jsonl, .json or .parquet file."""


def look_at(path: Path, prompt_column: str = "", check: RowCheck | None = None) -> DataFile:
    """Read the columns and count the records of a .jsonl, .json, .csv or .parquet file.

    Args:
        prompt_column: column that is searched for images, sounds and videos.
        check: done for each row, except of a .csv file, whose values have no type yet.

    Raises:
        UnreadableData: the file has no record, an invalid record, or a column with several types; the message
            names the line. Only the first 32 MiB of a larger file are read; of a larger .csv only the columns.
    """
    if path.suffix == ".parquet":
        return _parquet(path, prompt_column, check)
    with translate_errors():
        counted = path.stat().st_size <= LOOKED_AT
        file = _csv(path, counted) if path.suffix == ".csv" else _json(path, counted, prompt_column, check)
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


def _json(path: Path, counted: bool, prompt_column: str, check: RowCheck | None) -> DataFile:
    columns = Columns()
    records, without, media, misfit = 0, "", "", None
    for place, row in json_rows(path, None if counted else LOOKED_AT):
        columns.add(place, row)
        if not without and row.get(prompt_column) is None:
            without = place
        media = media or _media(row.get(prompt_column), place)
        if check is not None and misfit is None:
            misfit = check.find(row, f"{place} of {path.name}")
        records += 1
    return DataFile(columns.names, records if counted else None, without, media, misfit)


def _media(prompt: object, place: str) -> str:
    kind = media_part(prompt)
    return f"{place} has a part of type {kind}" if kind else ""


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


def _parquet(path: Path, prompt_column: str, check: RowCheck | None) -> DataFile:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        what = "is not a parquet file" if isinstance(error, pyarrow.ArrowInvalid) else "cannot be read"
        raise UnreadableData(f"{what}: {' '.join(text_of(error).split())}") from error
    with parquet:
        if not parquet.metadata.num_rows:
            raise UnreadableData("has no record")
        columns, media = parquet.schema_arrow, ""
        nested = prompt_column in columns.names and pyarrow.types.is_nested(columns.field(prompt_column).type)
        is_small = path.stat().st_size <= LOOKED_AT
        misfit = None
        if check is not None and is_small and set(check.columns) <= set(columns.names):
            rows = enumerate(parquet.read(list(check.columns)).to_pylist())
            problems = (check.find(row, f"row {number} (from 0) of {path.name}") for number, row in rows)
            misfit = next(filter(None, problems), None)
        if nested and is_small:
            prompts = parquet.read([prompt_column]).column(prompt_column).to_pylist()
            places = (_media(prompt, f"row {number} (from 0)") for number, prompt in enumerate(prompts))
            media = next(filter(None, places), "")
        return DataFile(tuple(columns.names), parquet.metadata.num_rows, media=media, misfit=misfit)
