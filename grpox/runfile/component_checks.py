"""Checks of environments, tools and reward functions: they can be called, and fit the data and the limits."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpox.config import EnvironmentRef, EpisodesConfig, WhenConfig
from grpox.contracts import Capability
from grpox.data.reward_signature import Signature, column_problem, lacking, missing_columns, unnamed_parameter
from grpox.environments import Environment
from grpox.environments.contract import as_function, tool_problem, tools_of
from grpox.environments.from_factory import as_environment
from grpox.errors import ConfigError, Problem, describe, nearest
from grpox.errors.validation import written
from grpox.plugins.component import BoundComponent, contract_problem
from grpox.plugins.load_object import load_object
from grpox.plugins.requirements import canonical_name
from grpox.runfile.checks import CheckContext
from grpox.runfile.data_files import equal
from grpox.runtime.signals import raise_if_signal


@dataclass(frozen=True)
class BoundTool:
    """A function that the model may call in every environment of the run."""

    name: str
    """Name for the model."""
    function: Callable[..., Any]
    reference: str
    """``/path/to/file.py:name`` or ``package.module:name``."""
    given: bool = False
    """True if it is an object given in Python."""


def environment_problems(context: CheckContext) -> Iterator[Problem]:
    """Find mistakes in the environments, tools and limits of episodes, and in what goes with them."""
    config, generator = context.config, context.generator
    yield from _when_problems(config.environments)
    problems: list[Problem] = []
    classes: dict[str, type[Environment]] = {}
    for key in config.environments:
        try:
            classes[key] = _class_of(context.components[key])
        except ConfigError as error:
            problems += error.problems
    first: dict[str, str] = {}
    for place, reference in enumerate(config.tools):
        key = f"tools[{place}]"
        try:
            name = bound_tool(key, reference, context.given.functions).name
        except ConfigError as error:
            problems += error.problems
            continue
        others = [f"{owner} has a tool" for owner, each in classes.items() if name in tools_of(each)]
        for other in [*others, *([first[name]] if name in first else [])]:
            what = f"{other} of the same name, and the model could not tell them apart"
            problems.append(Problem(what, key, given=name, allowed="a function of another name"))
        first.setdefault(name, f"{key} is")
    yield from problems
    yield from _unused_weights(context)
    yield from _limits(context)
    if config.has_episodes and Capability.MAX_TOKENS not in generator.provides:
        able = ", ".join(context.offered("generator", Capability.MAX_TOKENS))
        what = f"{generator} does not provide '{Capability.MAX_TOKENS}', which turns of an episode need"
        yield Problem(what, "generator", allowed=able)


def _when_problems(environments: Mapping[str, EnvironmentRef]) -> Iterator[Problem]:
    seen: list[tuple[str, WhenConfig]] = []
    for key, each in environments.items():
        if (own := each.when) is None:
            if len(environments) > 1:
                what = "of several environments, each names the rows that it is for"
                yield Problem(what, f"{key}.when", given="null", allowed="{column: NAME, is: VALUE}")
            continue
        for other, when in seen:
            if when.column == own.column and equal(when.equals, own.equals):
                given = f"{when.column} is {written(when.equals)}"
                yield Problem(f"names the same rows as {other}", f"{key}.when", given=given)
        seen.append((key, own))


def _class_of(bound: BoundComponent) -> type[Environment]:
    """Load the class of an environment, which a plugin's list only names."""
    try:
        target = bound.load()
    except BaseException as error:
        raise_if_signal(error)
        raise ConfigError(f"{bound} cannot be loaded: {describe(error)}", bound.key) from error
    if problem := contract_problem(bound.kind, target):
        raise ConfigError(f"{bound} {problem}", bound.key, given=repr(target))
    environment = as_environment(target)
    if problems := [*build_problems(bound, environment)]:
        raise ConfigError(problems)
    return environment


def _unused_weights(context: CheckContext) -> Iterator[Problem]:
    """Find weights of environments whose own rewards no reward function reads."""
    bounds = context.components.values()
    if any(bound.kind == "reward" and Capability.EPISODE_REWARD in bound.needs for bound in bounds):
        return
    offers = [offer for offer in context.plugins.offers if offer.kind == "reward"]
    readers = [offer.spec.name for offer in offers if Capability.EPISODE_REWARD in offer.spec.needs]
    for key, each in context.config.environments.items():
        if each.weight != 1:
            what = "has no effect: no reward function of the run reads the environment's own reward"
            allowed = f"1, or rewards with {' or '.join(readers)}"
            yield Problem(what, f"{key}.weight", given=f"{each.weight:g}", allowed=allowed)


def _limits(context: CheckContext) -> Iterator[Problem]:
    config, episodes = context.config, context.config.episodes
    if not config.has_episodes:
        what, default = "has no effect: the run has neither an environment nor tools", EpisodesConfig()
        for name, value in episodes:
            if value != getattr(default, name):
                yield Problem(what, f"episodes.{name}", given=written(value))
        return
    longest = config.sampling.max_completion_length
    if (most := episodes.max_turn_tokens) is not None and most > longest:
        what = "is more than a whole episode may have, sampling.max_completion_length"
        yield Problem(what, "episodes.max_turn_tokens", given=str(most), allowed=f"1 to {longest}, or null")
    if (most := episodes.max_observation_tokens) is not None and most >= longest:
        what = "leaves no room for a turn: observations count for sampling.max_completion_length"
        allowed = f"less than {longest}, or null"
        yield Problem(what, "episodes.max_observation_tokens", given=str(most), allowed=allowed)
    own = config.evaluation.sampling.min_completion_length if config.evaluation is not None else None
    for key, least in (("sampling", config.sampling.min_completion_length), ("evaluation.sampling", own)):
        if least:
            what = "is of a whole completion, and generators would demand it of each turn of an episode"
            yield Problem(what, f"{key}.min_completion_length", given=str(least), allowed="0")


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


def build_problems(bound: BoundComponent, target: type) -> Iterator[Problem]:
    """Find the problem of a class that needs other arguments than its parameters to be built."""
    try:
        inspect.signature(target).bind(*(() if bound.config is None else (bound.config,)))
    except TypeError as error:
        form = "without an argument, as it has no Config" if bound.config is None else "with its parameters"
        what = f"{bound} is built {form}, which its __init__ does not take: {error}"
        yield Problem(what, bound.key, given=repr(target))
    except ValueError:  # its signature is unknown
        pass


def bound_tool(key: str, reference: str, given: Mapping[str, Callable[..., Any]]) -> BoundTool:
    """Load a tool and check that the model can be told of it."""
    try:
        loaded = given[key] if key in given else _load_function(reference)
    except ConfigError as error:
        raise ConfigError([replace(problem, key=key) for problem in error.problems]) from error
    function, name = as_function(loaded), reference.rpartition(":")[2]
    if key in given or hasattr(loaded, "__name__"):  # another object has no name of its own
        name = str(getattr(function, "__name__", type(function).__name__))
    if problem := tool_problem(function, name):
        raise ConfigError(f"tool '{name}' {problem}", key, given=reference)
    return BoundTool(name, function, reference, key in given)


def _load_function(reference: str) -> Any:
    """Load ``file.py:name`` or ``package.module:name``."""
    module, _, name = reference.rpartition(":")
    if module.endswith(".py"):
        return load_object(reference)
    if not module or not name:
        allowed = "file.py:name or package.module:name"
        raise ConfigError("does not name a function", given=reference, allowed=allowed)
    try:
        loaded = importlib.import_module(module)
    except BaseException as error:
        raise_if_signal(error)
        what, file = f"{module} cannot be imported: {describe(error)}", f"{module.replace('.', '/')}.py"
        if isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name)):
            what = f"there is no module {error.name}; a file is named with its ending, {file}:{name}"
        raise ConfigError(what, given=reference) from error
    if not hasattr(loaded, name):
        names = [known for known in vars(loaded) if not known.startswith("_")]
        raise ConfigError(f"{module} has no '{name}'", given=reference, nearest=nearest(name, names))
    return getattr(loaded, name)
