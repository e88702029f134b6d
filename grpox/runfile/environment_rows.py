"""The rows of the data that each environment of a run is for: which belongs to which, and which to none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpox.config import WhenConfig
from grpox.data.prompts import PromptSet
from grpox.errors import ConfigError, Problem, RunFailed, nearest
from grpox.errors.validation import written
from grpox.runfile.data_files import RowCheck


class EnvironmentOfRow:
    """Finds the environment of a prompt by its row; all rows of a dataset are checked at once.

    Raises:
        ConfigError: a column that tells the rows apart is missing, or a row belongs to no environment or to
            several; the message names the row.
    """

    def __init__(self, whens: Sequence[WhenConfig | None], prompts: PromptSet) -> None:
        self._whens = whens
        self._prompts = prompts
        names = prompts.column_names
        if problems := [*missing_columns(whens, names, prompts.data)]:
            raise ConfigError(problems)
        self._places: list[int] | None = None
        if prompts.stream is None:
            columns = {each.column: prompts.column(each.column) for each in whens if each is not None}
            rows = zip(*columns.values(), strict=True) if columns else ((),) * len(prompts)
            self._places = [
                self._place(index, dict(zip(columns, row, strict=True))) for index, row in enumerate(rows)
            ]

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
