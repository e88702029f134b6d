"""Checks of reward functions before a run: they can be called, and the data has the columns that they need."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from grpox.data.reward_signature import Signature, column_problem, lacking, missing_columns, unnamed_parameter
from grpox.errors import ConfigError, Problem
from grpox.plugins.component import BoundComponent
from grpox.plugins.requirements import canonical_name
from grpox.runfile.checks import CheckContext, build_problems
from grpox.runtime.signals import raise_if_signal


def reward_problems(context: CheckContext) -> Iterator[Problem]:
    """Find reward functions that cannot be called, and columns that they need and the data lacks."""
    evaluation = context.config.evaluation
    has_own = evaluation is not None and evaluation.rewards is not None
    for key, bound in context.components.items():
        is_own = key.startswith("evaluation.")
        if bound.kind != "reward" or (has_own and not is_own and not context.trains):
            continue
        try:
            function = _called(bound)
        except ConfigError as error:
            yield from error.problems
            continue
        for path, columns in context.columns.items():
            if is_own if path == "data.path" else is_own != has_own:
                continue  # others score these rows
            data = "the data" if path == "data.path" else "the evaluation data"
            for name in _missing(bound, function, columns):
                # The parameter that names the column, or the reward's own key.
                named = [f".{field}" for field, value in bound.config or () if value == name]
                place = "".join([key, *named[:1]])
                yield column_problem(bound.label, name, columns, place, data)


def _called(bound: BoundComponent) -> Any:
    """Return the function whose signature a call of the reward has; None if that is not known cheaply.

    Raises:
        ConfigError: it cannot be called, or its object cannot be built.
    """
    if bound.offer is not None and canonical_name(bound.offer.distribution) == "grpox":
        return None  # its config names its columns, and its module may import torch
    try:
        target = bound.load()
    except BaseException as error:  # noqa: BLE001 - a plugin's own code; building it reports the failure
        raise_if_signal(error)
        return None
    name, function = f"reward '{bound.label}'", target
    if inspect.isclass(target):
        if problems := [*build_problems(bound, target)]:
            raise ConfigError(problems)
        if not any("__call__" in vars(each) for each in target.__mro__):
            what = f"{name} is a class whose objects cannot be called"
            raise ConfigError(what, bound.key, given=repr(target), allowed="a class with a method __call__")
        method = inspect.getattr_static(target, "__call__")
        function = method.__get__(object(), target) if hasattr(method, "__get__") else method
    try:
        unnamed = unnamed_parameter(function)
    except TypeError:  # not callable: building it reports that
        return None
    if unnamed:
        what = f"{name} takes '{unnamed}' by position, and grpox gives all arguments by name"
        raise ConfigError(what, bound.key, given=f"{bound.label}{inspect.signature(function)}")
    if Signature.of(function).names == frozenset():
        what = f"{name} takes no argument by name, so that it cannot see what it scores"
        given, allowed = f"{bound.label}{inspect.signature(function)}", "such as (completions, **columns)"
        raise ConfigError(what, bound.key, given=given, allowed=allowed)
    return function


def _missing(bound: BoundComponent, function: Any, columns: tuple[str, ...]) -> list[str]:
    """List the columns that a reward needs, by its config and its signature, and that `columns` lacks."""
    by_config = getattr(bound.config, "reads_columns", ())
    by_signature = missing_columns(function, columns) if function is not None else []
    of_class = getattr(bound.load(), "reads_columns", ()) if function is not None else ()
    declared = [*by_config, *(of_class if isinstance(of_class, tuple | list) else ())]
    return list(dict.fromkeys([*lacking(declared, columns), *by_signature]))
