"""Checks of the environments, tools and limits of episodes, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from grpox.config import EnvironmentRef, EpisodesConfig, WhenConfig
from grpox.contracts import Capability
from grpox.environments import Environment
from grpox.environments.contract import tools_of
from grpox.environments.from_factory import as_environment
from grpox.errors import ConfigError, Problem, describe
from grpox.errors.validation import written
from grpox.plugins.component import BoundComponent, contract_problem
from grpox.runfile.checks import CheckContext, build_problems
from grpox.runfile.environment_rows import equal
from grpox.runfile.environments import bound_tool
from grpox.runtime.signals import raise_if_signal


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
