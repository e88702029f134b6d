"""Which keyword arguments a reward function is given, decided by its signature."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

from grpox.data.unusable_columns import REWARD_ARGUMENTS
from grpox.runtime.signals import raise_if_signal

_asked: WeakKeyDictionary[Callable[..., Any], list[inspect.Parameter] | None] = WeakKeyDictionary()
"""Parameters by function: Python takes longer to tell them than a simple reward takes to score."""

_UNCHANGING = {str, int, float, bool, bytes, NoneType}
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that `function` takes: all of them with ``**kwargs``, else those it names."""
    names = taken(function)
    return {name: value for name, value in arguments.items() if names is None or name in names}


def own_copies(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that `function` takes; their lists, rows and other values are deep copies.

    An object that Python cannot copy, and `trainer_state`, are shared.
    """
    return {
        name: value if name == "trainer_state" else copied(value)
        for name, value in accepted(function, arguments).items()
    }


def copied(value: Any) -> Any:
    """Return a deep copy; what Python cannot copy is shared, in a list each such value by itself."""
    if type(value) is list and not set(map(type, value)) <= _UNCHANGING:
        return [_copied_if_possible(each) for each in value]
    return _copied_if_possible(value)


def _copied_if_possible(value: Any) -> Any:
    try:
        return _copied(value)
    except RecursionError:  # it contains itself, which only copy.deepcopy can copy, or is nested too deeply
        return _copied_by_python(value)


def _copied(value: Any) -> Any:
    """Copy deeply, and a list of many numbers or texts at once, as copy.deepcopy does not."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is list:
        return value.copy() if set(map(type, value)) <= _UNCHANGING else [_copied(each) for each in value]
    if kind is tuple:
        return value if set(map(type, value)) <= _UNCHANGING else tuple(map(_copied, value))
    if kind is dict:
        return {name: _copied(each) for name, each in value.items()}
    return _copied_by_python(value)


def _copied_by_python(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except BaseException as error:  # noqa: BLE001 - a lock, a connection: what has no copy is shared, as documented
        raise_if_signal(error)
        return value


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
    available = {*columns, *REWARD_ARGUMENTS}
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
