"""A look at a data file that costs little: its columns, the number of records, and lines that are none."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from grpox.data.json_rows import LOOKED_AT, Columns, UnreadableData, json_rows, translate_errors
from grpox.data.unusable_columns import media_part
from grpox.errors import text_of


@dataclass(frozen=True)
class DataFile:
    """What a look at a data file told."""

    columns: tuple[str, ...]
    """Columns of the records looked at."""
    records: int | None
    """None when the file is too large to count cheaply."""
    without_prompt: str = ""
    """Place of the first record of a .jsonl or .json file that has none."""
    media: str = ""
    """Name the place of a prompt's image or the like: ``line 3 has a part of type image_url``."""


def look_at(path: Path, prompt_column: str = "") -> DataFile:
    """The columns and the number of records of a .jsonl, .json, .csv or .parquet file.

    Args:
        prompt_column: where prompts are looked for that are more than text.

    Raises:
        UnreadableData: it holds no record, what is none, or a column with several types: the line is named.
            Of a file of more than 32 MiB only as much is looked at, and of a .csv its columns alone.
    """
    if path.suffix == ".parquet":
        return _parquet(path, prompt_column)
    with translate_errors():
        counted = path.stat().st_size <= LOOKED_AT
        found = _csv(path, counted) if path.suffix == ".csv" else _json(path, counted, prompt_column)
    if found.records == 0:
        raise UnreadableData("holds no record")
    return found


def _json(path: Path, counted: bool, prompt_column: str) -> DataFile:
    columns = Columns()
    records, without, media = 0, "", ""
    for place, row in json_rows(path, None if counted else LOOKED_AT):
        columns.add(place, row)
        if not without and row.get(prompt_column) is None:
            without = place
        media = media or _media(row.get(prompt_column), place)
        records += 1
    return DataFile(columns.names, records if counted else None, without, media)


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
                    what = f"line {rows.line_num} has {len(row)} values for {len(columns)} columns"
                    raise UnreadableData(what)
                records += bool(row)  # an empty line is no record
            return DataFile(columns, records if counted else None)
        except csv.Error as error:
            raise UnreadableData(f"line {rows.line_num} is not CSV: {error}") from error


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
        if nested and path.stat().st_size <= LOOKED_AT:
            prompts = parquet.read([prompt_column]).column(prompt_column).to_pylist()
            found = (_media(prompt, f"row {number} (from 0)") for number, prompt in enumerate(prompts))
            media = next(filter(None, found), "")
        return DataFile(tuple(columns.names), parquet.metadata.num_rows, media=media)
