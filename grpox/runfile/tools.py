"""Functions that a run file names as tools for the model: loaded, and checked one by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpox.environments.contract import as_function, tool_problem
from grpox.errors import ConfigError, describe, nearest
from grpox.plugins.load_object import load_object
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


def bound_tool(key: str, reference: str, given: Mapping[str, Callable[..., Any]]) -> BoundTool:
    """Load a tool and check that the model can be told of it."""
    try:
        loaded = given[key] if key in given else load_function(reference)
    except ConfigError as error:
        raise ConfigError([replace(problem, key=key) for problem in error.problems]) from error
    function = as_function(loaded)
    if key in given or hasattr(loaded, "__name__"):
        name = str(getattr(function, "__name__", type(function).__name__))
    else:  # an object has no name of its own
        name = reference.rpartition(":")[2]
    if problem := tool_problem(function, name):
        raise ConfigError(f"tool '{name}' {problem}", key, given=reference)
    return BoundTool(name, function, reference, key in given)


def load_function(reference: str) -> Any:
    """Load ``file.py:name`` or ``package.module:name``.

    Raises:
        ConfigError: the reference has another form, or there is no such file, module or name.
    """
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
        if isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name)):
            file = f"{module.replace('.', '/')}.py"
            what = f"there is no module {error.name}; a file is named with its ending, {file}:{name}"
            raise ConfigError(what, given=reference) from error
        raise ConfigError(f"{module} cannot be imported: {describe(error)}", given=reference) from error
    if not hasattr(loaded, name):
        names = [known for known in vars(loaded) if not known.startswith("_")]
        raise ConfigError(f"{module} has no '{name}'", given=reference, nearest=nearest(name, names))
    return getattr(loaded, name)
