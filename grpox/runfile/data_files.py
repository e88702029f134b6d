"""Cheap check of a data file: columns, number of records, lines that are not records; environments of rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.config import WhenConfig
from grpox.data.json_rows import LOOKED_AT, Columns, UnreadableData, json_rows, translate_errors
from grpox.data.prompts import PromptSet
from grpox.data.unusable_columns import media_part
from grpox.errors import ConfigError, Problem, RunFailed, nearest, text_of
from grpox.errors.validation import written


@dataclass(frozen=True)
class RowCheck:
    """A check of each row of a file."""

    columns: Collection[str]
    """Columns that it reads."""
    find: Callable[[Mapping[str, Any], str], Problem | None]
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
        columns, media, misfit = parquet.schema_arrow, "", None
        names, is_small = tuple(columns.names), path.stat().st_size <= LOOKED_AT
        if check is not None and is_small and set(check.columns) <= set(names):
            rows = enumerate(parquet.read(list(check.columns)).to_pylist())
            problems = (check.find(row, f"row {number} (from 0) of {path.name}") for number, row in rows)
            misfit = next(filter(None, problems), None)
        if is_small and prompt_column in names and pyarrow.types.is_nested(columns.field(prompt_column).type):
            prompts = parquet.read([prompt_column]).column(prompt_column).to_pylist()
            places = (_media(prompt, f"row {number} (from 0)") for number, prompt in enumerate(prompts))
            media = next(filter(None, places), "")
        return DataFile(names, parquet.metadata.num_rows, media=media, misfit=misfit)


class EnvironmentOfRow:
    """Finds the environment of a prompt by its row; all rows of a dataset are checked at once.

    Raises:
        ConfigError: a column that tells the rows apart is missing, or a row belongs to no environment or to
            several; the message names the row.
    """

    def __init__(self, whens: Sequence[WhenConfig | None], prompts: PromptSet) -> None:
        self._whens, self._prompts = whens, prompts
        if problems := [*missing_columns(whens, prompts.column_names, prompts.data)]:
            raise ConfigError(problems)
        self._places: list[int] | None = None
        if prompts.stream is None:
            columns = {each.column: prompts.column(each.column) for each in whens if each is not None}
            rows = zip(*columns.values(), strict=True) if columns else ((),) * len(prompts)
            self._places = [self._place(n, dict(zip(columns, row, strict=True))) for n, row in enumerate(rows)]

    def __call__(self, row: int) -> int:
        """Return the place of the row's environment in the run's list.

        Raises:
            RunFailed: a row of a stream belongs to no environment, or to several.
        """
        if self._places is not None:
            return self._places[row]
        _, columns = self._prompts.rows([row])
        try:
            return self._place(row, {name: values[0] for name, values in columns.items()})
        except ConfigError as error:
            raise RunFailed(str(error.problems[0])) from error

    def _place(self, index: int, row: Mapping[str, Any]) -> int:
        places = _matching(row, self._whens)
        if len(places) != 1 and (problem := misfit(row, self._whens, self._prompts.place(index))):
            raise ConfigError(problem)
        return places[0]


def misfit(row: Mapping[str, Any], whens: Sequence[WhenConfig | None], place: str) -> Problem | None:
    """Return the problem with a row of the data that belongs to no environment, or to several.

    Args:
        place: the row in words, for the message.
    """
    places = _matching(row, whens)
    if len(places) == 1:
        return None
    columns = list(dict.fromkeys(when.column for when in whens if when is not None))
    wanted = [f"{when.column} is {written(when.equals)}" for when in whens if when is not None]
    given = ", ".join(f"{name} {_typed(row.get(name))}" for name in columns)
    what = f"{place} belongs to no environment"
    if places:
        what = f"{place} belongs to {' and '.join(key_of(place, whens) for place in places)}; a row has one"
    near = nearest(given, [f"{when.column} {_typed(when.equals)}" for when in whens if when is not None])
    near = near if not places and near != given else ""
    return Problem(what, "environment", given=given, allowed="; ".join(wanted), nearest=near)


def _matching(row: Mapping[str, Any], whens: Sequence[WhenConfig | None]) -> list[int]:
    return [
        place for place, when in enumerate(whens) if when is None or equal(row.get(when.column), when.equals)
    ]


def equal(value: Any, wanted: Any) -> bool:
    """Compare as YAML does: true is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _typed(value: Any) -> str:
    """Write a value so that text and number differ: ``'1'`` and ``1``."""
    return repr(value) if isinstance(value, str) else written(value)


def key_of(place: int, whens: Sequence[object]) -> str:
    return f"environment[{place}]" if len(whens) > 1 else "environment"


def missing_columns(whens: Sequence[WhenConfig | None], columns: Sequence[str], data: str) -> Iterator[Problem]:
    for place, when in enumerate(whens):
        if when is not None and when.column not in columns:
            near, names = nearest(when.column, columns), ", ".join(columns) or "no column beside the prompt"
            key = f"{key_of(place, whens)}.when.column"
            yield Problem(f"no such column in {data}", key, given=when.column, allowed=names, nearest=near)


def row_check(whens: Sequence[WhenConfig | None]) -> RowCheck | None:
    """Return the check of the rows of a file; None if every row has the run's only environment.

    It is also None for several environments of which one names no rows, which is a mistake of its own.
    """
    if None in whens:
        return None
    columns = {when.column for when in whens if when is not None}
    return RowCheck(columns, lambda row, place: misfit(row, whens, place)) if columns else None
