"""Which keyword arguments a reward function is given, decided by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

CORE_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""What the core passes by itself; every other argument of a reward function is a dataset column."""

_asked: WeakKeyDictionary[Callable[..., Any], list[inspect.Parameter] | None] = WeakKeyDictionary()
"""Parameters by function: Python takes longer to tell them than a simple reward takes to score."""

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that `function` takes: all of them with ``**kwargs``, else those it names."""
    names = taken(function)
    return {name: value for name, value in arguments.items() if names is None or name in names}


def taken(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments that `function` takes; None if it takes any."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in _BY_KEYWORD)


def missing_columns(function: Callable[..., Any], columns: Iterable[str]) -> list[str]:
    """Dataset columns that `function` cannot do without and that `columns` lacks, in its own order.

    These are its parameters without a default and whatever its optional attribute `reads_columns` names
    (for a function that takes ``**columns`` and picks one by a name from its config).
    """
    available = {*columns, *CORE_ARGUMENTS}
    needed = [p.name for p in _parameters(function) or () if p.kind in _BY_KEYWORD and p.default is p.empty]
    needed += [name for name in getattr(function, "reads_columns", ()) if name not in needed]
    return [name for name in needed if name not in available]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of `function`; None where Python cannot tell, as for some callables written in C."""
    with suppress(KeyError, TypeError):
        return _asked[function]
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:
        found = None
    with suppress(TypeError):  # it cannot be hashed, or not be referred to weakly
        _asked[function] = found
    return found
