"""Checks what a reward function returned: one finite number, or None to abstain, per completion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any, SupportsFloat


class BadScores(Exception):
    """What a reward function returned is not one finite number or None per completion."""


def checked_scores(returned: Any, count: int) -> list[float | None]:
    """`returned` as a list of `count` floats or None; numpy and torch scalars are converted.

    Raises:
        BadScores: it is no such list; the message says what is wrong and at which index.
    """
    # A string, mapping or set iterates too, but not in the order of the completions.
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | Set):
        raise BadScores(f"returned {_described(returned)}, not a list of {count} numbers")
    try:
        scores = list(returned)
    except TypeError as error:  # an array or tensor without dimensions
        raise BadScores(f"returned {_described(returned)}, not a list of {count} numbers") from error
    if len(scores) != count:
        raise BadScores(f"returned {len(scores)} scores for {count} completions")
    return [_checked_score(score, index) for index, score in enumerate(scores)]


def _checked_score(score: Any, index: int) -> float | None:
    if score is None:
        return None
    refusal = f"returned {_described(score)} for completion {index}; a score is a finite number or None"
    if not isinstance(score, SupportsFloat):  # so that "0.5", which float() would take, is refused
        raise BadScores(refusal)
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # a tensor of several elements
        raise BadScores(refusal) from error
    if not math.isfinite(number):
        raise BadScores(refusal + " (None abstains)" if math.isnan(number) else refusal)
    return number


def _described(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
