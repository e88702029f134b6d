"""The contract of environments: which methods the model may call, and what is wrong with a class or a tool."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from grpox.environments.environment import APART, MARK, Environment
from grpox.environments.from_factory import as_environment
from grpox.errors import describe

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
    methods = {name.removeprefix(APART): getattr(environment, name) for name in dict.fromkeys(marked)}
    return {name: method for name, method in methods.items() if method is not None}


def attribute_of(environment: type, tool_name: str) -> str:
    """Return the name of the attribute that holds a tool of a class."""
    return APART + tool_name if hasattr(environment, APART + tool_name) else tool_name


def is_method(environment: type, tool_name: str) -> bool:
    """Tell whether the first parameter of a tool of a class is the instance."""
    member = inspect.getattr_static(environment, attribute_of(environment, tool_name))
    return not isinstance(member, staticmethod | classmethod)


def as_function(target: Any) -> Any:
    """Return an object that can be called, or a functools.partial, as a function; anything else as it is.

    The function has the name of the object's class or of the partial's function, and its docstring. Arguments
    that a partial gives are not the model's.
    """
    given: dict[str, Any] = {}
    if isinstance(target, functools.partial):
        inner, given = as_function(target.func), target.keywords
    elif hasattr(target, "__name__") or not inspect.ismethod(inner := getattr(target, "__call__", None)):  # noqa: B004 - a bound one
        return target
    try:
        every = inspect.signature(target).parameters.values()
        hints = typing.get_type_hints(inner, include_extras=True)
    except Exception:  # noqa: BLE001 - whatever a hint raises: `tool_problem` and `Tool` report it
        return inner
    parameters = [
        each.replace(annotation=hints.get(each.name, each.annotation))
        for each in every
        if each.name not in given
    ]

    def call(**arguments: Any) -> Any:
        return target(**arguments)

    # `__wrapped__` has its file, and says whether it is async.
    functools.update_wrapper(call, inner, assigned=("__module__", "__doc__"), updated=())
    call.__name__ = call.__qualname__ = inner.__name__
    if inner.__name__ == "__call__":
        call.__name__ = call.__qualname__ = type(target).__name__
        call.__doc__ = inner.__doc__ or type(target).__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def tool_problem(function: Any, name: str, is_method: bool = False) -> str:
    """Return why the model cannot be told of a tool; empty if nothing is wrong.

    Args:
        is_method: True for a method in its class, whose first parameter is the instance.
    """
    if inspect.isclass(function):
        return "is a class; give a function, or an object of a class with a method __call__"
    if not callable(function):
        return "is no function, and no object that can be called"
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        return f"has the name {name!r}; a tool's name begins with a letter, and is one word"
    if not (inspect.getdoc(function) or "").strip():
        return "has no docstring, from which the model learns what it does"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        return f"has no signature that Python can read ({describe(error)}); call it in a function of your own"
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
        if attribute_of(target, name) in CONTRACT:
            return f"marks its method {name} as a tool, which grpox calls itself; rename the tool"
        if problem := tool_problem(method, name, is_method(target, name)):
            return f"has the tool '{name}', which {problem}"
    return ""


def overrides(environment: type[Environment], method: str) -> bool:
    """Tell whether a class has its own version of a method of `Environment`."""
    return getattr(environment, method) is not getattr(Environment, method)
