"""Checks the scores of a reward call, a finite number or None (abstains) per completion, and keeps its logs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from grpox.runtime.foreign_code import copied

FLOAT32_MAX = 3.4028234663852886e38
"""Beyond it a score would be infinite where rewards become advantages."""


class BadScores(Exception):
    """What a reward function returned is not one value per completion."""


@dataclass(frozen=True)
class CheckedScores:
    """The scores of N completions, and what is wrong with those that are no scores."""

    values: list[float | None]
    """[N]; None where the function abstained or returned no score."""
    refused: dict[int, str] = field(default_factory=dict)
    """Index of a completion -> why its value is no score."""


def checked_scores(returned: Any, count: int) -> CheckedScores:
    """`returned` as `count` floats or None; numpy and torch scalars are converted.

    Raises:
        BadScores: it is no list of that length; the message says what it is.
    """
    # A string, mapping or set iterates too, but not in the order of the completions.
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | Set):
        raise BadScores(f"returned {_described(returned)}, not a list of {count} numbers")
    try:
        scores = iter(returned)
    except TypeError as error:  # an array or tensor without dimensions
        raise BadScores(f"returned {_described(returned)}, not a list of {count} numbers") from error
    listed = list(scores)
    if len(listed) != count:
        raise BadScores(f"returned {len(listed)} scores for {count} completions")
    checked = CheckedScores([None] * count)
    for index, score in enumerate(listed):
        number = finite_number(score)
        if number is not None and abs(number) > FLOAT32_MAX:
            number = None
        checked.values[index] = number
        if number is None and score is not None:
            hint = " (None abstains)" if isinstance(score, SupportsFloat) else ""
            what = f"returned {_described(score)} for completion {index}; a score is a finite float32 or None"
            checked.refused[index] = what + hint
    return checked


@dataclass
class CallLog:
    """What one call of a reward function logs through `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        """``log_metric(name, value)``; raises ValueError for what is no finite number."""
        number = finite_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}, {value!r}): a metric is a finite number")
        self.metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """``log_extra(column, values)``; several calls for one column append. Kept are copies of the values."""
        self.columns.setdefault(str(column), []).extend(copied(list(values)))

    def check(self, count: int) -> None:
        """Raises BadScores unless every column has a value for each of `count` completions."""
        for name, values in self.columns.items():
            if len(values) != count:
                raise BadScores(
                    f"logged {len(values)} values of log_extra column '{name}' for {count} completions"
                )


def finite_number(value: Any) -> float | None:
    """`value` as a float, numpy and torch scalars included; None for whatever is no finite number."""
    # Not "0.5", which float() would take. The usual kinds come first, as asking for a protocol takes long.
    if not isinstance(value, (float, int, SupportsFloat)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several elements
        return None
    return number if math.isfinite(number) else None


def _described(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
