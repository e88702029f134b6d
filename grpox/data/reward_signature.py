"""The arguments that a reward function takes by its signature, and the columns that it cannot do without."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

from grpox.data.unusable_columns import EPISODE_ARGUMENTS, REWARD_ARGUMENTS
from grpox.errors import Problem, nearest

_known_parameters: WeakKeyDictionary[Callable[..., Any], list[inspect.Parameter] | None] = WeakKeyDictionary()
"""Parameters by function: Python takes longer to tell them than a simple reward takes to score."""

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Signature:
    """Arguments that a reward function can be given by name."""

    names: frozenset[str] | None
    """Names of the arguments that it takes; None if it takes any."""
    facts: frozenset[str]
    """Names among them of facts about episodes, see `rewards.scoring.reward_inputs`."""
    needs: tuple[str, ...]
    """Columns that it cannot do without, in its own order.

    These are its parameters without a default and what its optional attribute `reads_columns` names (for a
    function that takes ``**columns`` and picks one by a name from its config).
    """

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Read the signature of `function`; without one it takes any argument."""
        parameters = _parameters(function)
        named = frozenset(p.name for p in parameters or () if p.kind in _BY_KEYWORD)
        any_name = parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        needed = [p.name for p in parameters or () if p.kind in _BY_KEYWORD and p.default is p.empty]
        needs = lacking([*needed, *getattr(function, "reads_columns", ())], ())
        return cls(None if any_name else named, named.intersection(EPISODE_ARGUMENTS), tuple(needs))


def missing_columns(function: Callable[..., Any], columns: Iterable[str]) -> list[str]:
    """Dataset columns that `function` cannot do without and that `columns` lacks, in its own order."""
    return lacking(Signature.of(function).needs, columns)


def lacking(needed: Iterable[str], columns: Iterable[str]) -> list[str]:
    """Select the names in `needed`, each once, that are neither columns nor arguments that grpox gives."""
    available = {*columns, *REWARD_ARGUMENTS, *EPISODE_ARGUMENTS}
    return [name for name in dict.fromkeys(needed) if not {name, name.partition(".")[0]} & available]


def nested_columns(needed: Iterable[str], columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Read dotted names in `needed`, as ``reward_model.ground_truth``, within columns; None for no value."""
    nested = {}
    for name in needed:
        first, *parts = name.split(".")
        if name not in columns and first in columns:
            nested[name] = [reduce(_part, parts, value) for value in columns[first]]
    return nested


def _part(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def column_problem(
    label: str, name: str, columns: Sequence[str], key: str, data: str, given: str = ""
) -> Problem:
    """Describe that the reward function `label` needs the column `name`, and `data` has only `columns`."""
    return Problem(
        f"reward '{label}' needs column '{name}', which {data} lacks",
        key,
        given=given,
        allowed=", ".join(columns) or "none beside the prompt",
        nearest=nearest(name, columns),
    )


def unnamed_parameter(function: Callable[..., Any]) -> str:
    """Name a parameter without default that cannot be given by name; empty if there is none."""
    parameters = _parameters(function) or ()
    only_by_place = inspect.Parameter.POSITIONAL_ONLY
    return next((p.name for p in parameters if p.kind is only_by_place and p.default is p.empty), "")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of `function`; None where Python cannot tell, as for some callables written in C."""
    with suppress(KeyError, TypeError):
        return _known_parameters[function]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        parameters = None
    with suppress(TypeError):  # it cannot be hashed, or not be referred to weakly
        _known_parameters[function] = parameters
    return parameters
