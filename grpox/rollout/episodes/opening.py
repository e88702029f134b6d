"""Opens the environments of a rank where the run file says: in processes of their own, or in the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from grpox.config import EpisodesConfig
from grpox.errors import ConfigError, Problem
from grpox.rollout.episodes.loading import importable
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import Blueprint
from grpox.rollout.episodes.pool import ProcessEnvironments


def open_environments(
    environments: Sequence[Blueprint], tools: Sequence[Blueprint], config: EpisodesConfig
) -> ProcessEnvironments | LocalEnvironments:
    """Open the environments of a run; whoever does must close them.

    Args:
        environments: the run's classes, in its order; none if it has tools alone.
        tools: the run's functions, which all environments have beside their own tools.
        config: limits, and where environments run.

    Raises:
        ConfigError: one cannot be loaded, is no environment or tool, or is an object given in Python that needs
            `isolation: none`.
    """
    if config.isolation == "none":
        return LocalEnvironments(environments, tools, config)
    problems: list[Problem] = []
    checked: dict[str, list[Blueprint]] = {"environment": [], "tool": []}
    for what, blueprints in (("environment", environments), ("tool", tools)):
        for blueprint in blueprints:
            try:
                checked[what].append(importable(blueprint, what))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return ProcessEnvironments(checked["environment"], checked["tool"], config)
