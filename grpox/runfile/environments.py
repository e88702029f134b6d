"""The environments and tools of a run: loaded, checked, and bound to their names and rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpox.config import WhenConfig, labels_of
from grpox.environments import Environment
from grpox.environments.contract import as_function, tool_problem
from grpox.errors import ConfigError, describe, nearest
from grpox.plugins.component import BoundComponent
from grpox.plugins.load_object import load_object
from grpox.runtime.signals import raise_if_signal

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

TOOLS_ALONE = "tools"
"""Label of the environment of a run that has only tools."""


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


@dataclass(frozen=True)
class BoundEnvironment:
    """An environment of a run, and the rows that it is for."""

    label: str
    """Name in metrics and files, different for each environment of the run."""
    component: BoundComponent
    when: WhenConfig | None = None
    """None: all rows."""
    weight: float = 1.0
    """Factor of its own reward."""
    given: bool = False
    """True if its class is an object given in Python."""


def bound_environments(run: ResolvedRun) -> list[BoundEnvironment]:
    """Return the environments of a run, in the order of the run file; none for a run without episodes.

    A run with tools alone has one environment, which does nothing else.
    """
    references = run.config.environments
    if not references and run.config.tools:
        plain = BoundComponent("environment", TOOLS_ALONE, "tools", load=lambda: Environment)
        return [BoundEnvironment(TOOLS_ALONE, plain)]
    labels = labels_of(list(references.values()))
    return [
        BoundEnvironment(label, run.components[key], each.when, each.weight, key in run.given.functions)
        for label, (key, each) in zip(labels, references.items(), strict=True)
    ]


def bound_tools(run: ResolvedRun) -> list[BoundTool]:
    """Return the tools of a run, in the order of the run file; a file is executed once per process."""
    functions = run.given.functions
    return [bound_tool(f"tools[{place}]", each, functions) for place, each in enumerate(run.config.tools)]


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
