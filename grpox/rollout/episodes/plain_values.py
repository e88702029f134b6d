"""Values of environments as plain ones, and equal states as equal text."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from numbers import Number, Real
from typing import Any

from grpox.contracts import FLOAT32_MAX, finite_number
from grpox.environments.tools import clean_text
from grpox.plugins.component_state import NotPlain

LONGEST_KEY = 100
"""Characters of the text of a state; a longer text is hashed."""
DEEPEST = 100
"""Levels of lists and mappings within each other."""


def plain_value(value: Any, place: str, depth: int = 0) -> Any:
    """Copy a value of None, texts, numbers, lists and mappings by text; scalars of numpy become numbers.

    Raises:
        NotPlain: it holds something else, a number beyond those of float64, or nests deeper than `DEEPEST`.
    """
    if depth > DEEPEST:
        raise NotPlain(f"{place[:60]}... nests deeper than {DEEPEST} levels")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise NotPlain(f"{place} is a whole number beyond those of float64")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise NotPlain(f"{place} has a key of type {type(name).__name__}; keys are text")
        return {
            clean_text(name): plain_value(item, f"{place}[{name!r}]", depth + 1) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return plain_value(item(), place)
    if isinstance(value, int | float) and not isinstance(value, Enum):
        return value + 0
    advice = "plain values are None, texts, numbers, and lists and mappings of them"
    raise NotPlain(f"{place} is a {type(value).__name__}; {advice}")


def number(value: Any, place: str) -> float:
    """Return a finite number as float; scalars of numpy and torch included.

    Raises:
        NotPlain: it is no finite number.
    """
    result = finite_number(value)
    if result is not None and abs(result) <= FLOAT32_MAX:
        return result
    shown = repr(value) if isinstance(value, float | str) else f"a {type(value).__name__}"
    raise NotPlain(f"{place} is {shown[:60]}, not a finite number")


def state_text(value: Any) -> str | None:
    """Return a text that is equal for equal values, in every process; None for None.

    Python's own hash does not serve: the hash of a text differs between processes.

    Raises:
        NotPlain: it holds an object whose equality cannot be told from a text.
    """
    if value is None:
        return None
    text = _text(value)
    return text if len(text) <= LONGEST_KEY else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, str | bytes):
        return repr(str(value) if isinstance(value, str) else bytes(value))
    if value is None:
        return "None"
    if isinstance(value, Enum) and not isinstance(value, Number):
        return f"{type(value).__qualname__}.{value.name}"
    if getattr(value, "shape", None) is not None and callable(listed := getattr(value, "tolist", None)):
        return _text(listed())  # of numpy
    if isinstance(value, Real | Decimal):
        # 1, 1.0 and True are equal, and so are their fractions.
        exact: Any = value
        return str(Fraction(exact)) if math.isfinite(value) else repr(float(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(name)}: {_text(item)}' for name, item in value.items()))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_text, value))}]"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{each.name}={_text(getattr(value, each.name))}" for each in fields(value) if each.compare)
        return f"{type(value).__qualname__}({', '.join(parts)})"
    advice = "it returns text, numbers, and tuples, sets and frozen dataclasses of them"
    raise NotPlain(f"state_key returned a {type(value).__name__}, whose equality has no text; {advice}")
