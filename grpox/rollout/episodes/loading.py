"""Environment classes and tools, loaded from their blueprints and checked."""

from __future__ import annotations

import pickle
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpox.environments import Environment
from grpox.environments.contract import as_function, environment_problem, tool_problem, tools_of
from grpox.environments.from_factory import as_environment
from grpox.environments.tools import Tool, ToolProblem, method_tool
from grpox.errors import ConfigError, Problem, describe
from grpox.plugins.load_object import load_object
from grpox.rollout.episodes.messages import EnvironmentSpec
from grpox.runtime.signals import raise_if_signal

ONLY_TOOLS = EnvironmentSpec("tools", "tools", Environment)
"""Environment of a run that has tools alone."""


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of environments with its parameters and tools."""

    label: str
    cls: type[Environment]
    config: Any
    """Its parameters; None if it has none."""
    tools: Mapping[str, Tool]
    """Tools by name: the run's functions, and the class's own methods."""

    def build(self) -> Environment:
        """Build an instance."""
        build: Any = self.cls
        instance: Environment = build() if self.config is None else build(self.config)
        return instance


def load_environments(
    blueprints: Sequence[EnvironmentSpec], tools: Sequence[EnvironmentSpec]
) -> list[EnvironmentClass]:
    """Load the classes of a run; if it has none, a class that has only the tools.

    Raises:
        ConfigError: a blueprint cannot be loaded or is no environment or tool; one problem for each.
    """
    problems: list[Problem] = []
    functions: dict[str, Tool] = {}
    for blueprint in tools:
        try:
            if blueprint.label in functions:
                raise ConfigError(f"two tools have the name '{blueprint.label}'", blueprint.key)
            function = as_function(_loaded(blueprint, f"tool '{blueprint.label}'"))
            if what := tool_problem(function, blueprint.label):
                raise ConfigError(f"tool '{blueprint.label}' {what}", given=repr(function))
            functions[blueprint.label] = Tool(blueprint.label, function)
        except ToolProblem as error:
            problems.append(Problem(f"tool '{blueprint.label}' {error}", blueprint.key))
        except ConfigError as error:
            problems += _keyed(error, blueprint)
    classes = []
    for blueprint in blueprints or [ONLY_TOOLS]:
        try:
            classes.append(_load_class(blueprint, functions))
        except ConfigError as error:
            problems += _keyed(error, blueprint)
    if problems:
        raise ConfigError(problems)
    return classes


def _load_class(blueprint: EnvironmentSpec, functions: Mapping[str, Tool]) -> EnvironmentClass:
    owner = f"environment '{blueprint.label}'"
    target = _loaded(blueprint, owner)
    if problem := environment_problem(target):
        raise ConfigError(f"{owner} {problem}", given=repr(target))
    cls = as_environment(target)
    problems, own = [], {}
    for name in tools_of(cls):
        if name in functions:
            problems.append(Problem(f"{owner} has a tool '{name}', and so has the key tools; rename one"))
        try:
            own[name] = method_tool(cls, name)
        except ToolProblem as error:
            problems.append(Problem(f"tool '{name}' of {owner} {error}"))
    if problems:
        raise ConfigError(problems)
    try:
        config = pickle.loads(blueprint.config)
    except Exception as error:
        raise ConfigError(f"{owner}: its parameters cannot be read: {describe(error)}") from error
    return EnvironmentClass(blueprint.label, cls, config, {**functions, **own})


def _loaded(blueprint: EnvironmentSpec, owner: str) -> Any:
    if not isinstance(blueprint.target, str):
        return blueprint.target
    from_file = blueprint.target.rpartition(":")[0].endswith(".py")
    try:
        return load_object(blueprint.target) if from_file else pkgutil.resolve_name(blueprint.target)
    except ConfigError:
        raise
    except BaseException as error:
        raise_if_signal(error)
        raise ConfigError(f"{owner} cannot be loaded: {describe(error)}", given=blueprint.target) from error


def _keyed(error: ConfigError, blueprint: EnvironmentSpec) -> list[Problem]:
    return [problem if problem.key else replace(problem, key=blueprint.key) for problem in error.problems]


def importable(blueprint: EnvironmentSpec, what: str) -> EnvironmentSpec:
    """Return the blueprint with its target as text, by which another process finds it.

    Args:
        what: ``environment`` or ``tool``.

    Raises:
        ConfigError: it is an object that cannot be imported, such as one of a notebook.
    """
    target = blueprint.target
    if isinstance(target, str):
        return blueprint
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    home: Any = None if module == "__main__" else sys.modules.get(module)
    try:
        for part in name.split("."):
            home = getattr(home, part)
    except AttributeError:
        home = None
    if home is not target or home is None:
        problem = f"{what} '{blueprint.label}' is an object given in Python, which no other process can import"
        cure = (
            "an object of a module or a file; or episodes.isolation: none, without time limits for sync tools"
        )
        raise ConfigError(problem, blueprint.key, given=f"{module}.{name}", allowed=cure)
    file = getattr(sys.modules[module], "__file__", None)
    # A module that was loaded from a file by its path is in no other process's sys.modules.
    place = file if module.startswith("grpox_file_") and "." not in name else module
    return replace(blueprint, target=f"{place}:{name}")
