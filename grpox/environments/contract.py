"""The contract of environments: which methods the model may call, and what is wrong with a class or a tool."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from grpox.environments.environment import MARK, Environment
from grpox.environments.from_factory import as_environment

CONTRACT = tuple(name for name in vars(Environment) if not name.startswith("_"))
"""Names that grpox itself uses of an environment; no tool can have one."""


def tools_of(environment: type[Environment]) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment's class by name, in the order of their definition.

    A method that overrides a tool is one too; ``move = None`` in a subclass removes the tool `move`.
    """
    marked = [
        name
        for base in reversed(environment.__mro__)
        for name, member in vars(base).items()
        if getattr(member, MARK, False) or getattr(getattr(member, "__func__", None), MARK, False)
    ]
    methods = {name: getattr(environment, name) for name in dict.fromkeys(marked)}
    return {name: method for name, method in methods.items() if method is not None}


def tool_problem(function: Any, name: str, is_method: bool = False) -> str:
    """Return why the model cannot be told of a tool; empty if nothing is wrong.

    Args:
        is_method: True for a method in its class, whose first parameter is the instance.
    """
    if not callable(function) or inspect.isclass(function):
        return "is no function"
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        return f"has the name {name!r}; a tool's name begins with a letter, and is one word"
    if not (inspect.getdoc(function) or "").strip():
        return "has no docstring, from which the model learns what it does"
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters[1:] if is_method else parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = parameter.kind.description
            return f"has the {kind} parameter '{parameter.name}'; the model gives arguments by name"
        if parameter.annotation is parameter.empty:
            return f"has no type hint for its parameter '{parameter.name}'"
        if not re.search(rf"^\s*{parameter.name}:", inspect.getdoc(function) or "", re.MULTILINE):
            return f"has no line '{parameter.name}: ...' under 'Args:' in its docstring"
    return ""


def environment_problem(target: Any) -> str:
    """Return why something is no environment, in grpox's form or TRL's; empty if it is one."""
    if isinstance(target, Environment):
        return "is an object; give its class, of which an instance is built for each episode"
    try:
        target = as_environment(target)
    except TypeError as error:
        return str(error)
    for name, method in tools_of(target).items():
        if name in CONTRACT:
            return f"marks its method {name} as a tool, which grpox calls itself"
        is_static = isinstance(inspect.getattr_static(target, name), staticmethod | classmethod)
        if problem := tool_problem(method, name, is_method=not is_static):
            return f"has the tool '{name}', which {problem}"
    return ""


def overrides(environment: type[Environment], method: str) -> bool:
    """Tell whether a class has its own version of a method of `Environment`."""
    return getattr(environment, method) is not getattr(Environment, method)
