"""Environments in TRL's form, run as they are: a class, or a function that returns an instance.

Its form: ``reset(**row)`` returns None, or text that continues the last message of the prompt; every other
public method is a tool, also one of the class, but no static one; ``get_reward()``, if it is there, returns the
reward of the episode. Here a method ``close`` is called at the end of each episode, and never offered to the
model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from grpox.environments.environment import APART, Appended, Environment, tool

OWN = ("reset", "get_reward", "close")
"""Public methods that are no tools."""


def as_environment(target: Any) -> type[Environment]:
    """Return a class of environments for `target`: itself, or an adapter for one in TRL's form.

    Args:
        target: a subclass of `Environment`, or a class or function in TRL's form. A function is called once.

    Raises:
        TypeError: it is none; the text continues a message after the name of `target`.
    """
    if inspect.isclass(target) and issubclass(target, Environment):
        return target
    if not callable(target):
        raise TypeError("is no class, and no function that returns an environment")
    kind = target if inspect.isclass(target) else type(target())
    if issubclass(kind, Environment):
        return _class_of(target, kind)
    if not callable(getattr(kind, "reset", None)):
        raise TypeError("has no method reset: it is no grpox.environments.Environment, and not in TRL's form")
    methods = (
        (name, _method(kind, name)) for name in dir(kind) if not name.startswith("_") and name not in OWN
    )
    tools = {
        APART + name if hasattr(Environment, name) else name: _passed_on(method)
        for name, method in methods
        if method is not None
    }
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_factory": staticmethod(target)}
    return type(kind.__name__, (_Adapter,), {**tools, **names})


class _Adapter(Environment):
    """An environment in TRL's form; all names of its own begin with ``_``, as those of no tool do."""

    _factory: Callable[[], Any]

    def __init__(self) -> None:
        self._inner = type(self)._factory()

    async def reset(self, row: Mapping[str, Any], seed: int) -> str | list[Mapping[str, Any]] | None:  # type: ignore[override]
        """Return what the inner `reset` does, as a continuation of the prompt."""
        observation = await _awaited(self._inner.reset(**row))
        return Appended(observation) if isinstance(observation, str) else observation

    async def reward(self) -> float | None:  # type: ignore[override]
        """Return `get_reward()`; None without it."""
        get_reward = getattr(self._inner, "get_reward", None)
        return None if get_reward is None else await _awaited(get_reward())

    async def close(self) -> None:  # type: ignore[override]
        """Close the inner environment if it can be closed."""
        close = getattr(self._inner, "close", None)
        if callable(close):
            await _awaited(close())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _method(kind: type, name: str) -> Callable[..., Any] | None:
    """Return a method as a function of the instance; None if it is none, or a static one.

    A method within a wrapper such as functools.lru_cache is one: what is bound to an instance, as TRL finds it.
    """
    member = inspect.getattr_static(kind, name)
    if not isinstance(member, classmethod):
        is_bound = hasattr(type(member), "__get__") and not isinstance(member, staticmethod)
        is_function = callable(member) and inspect.isfunction(inspect.unwrap(member))
        return member if is_bound and is_function else None

    @functools.wraps(member.__func__)
    def of_class(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return member.__func__(type(instance), *args, **kwargs)

    return of_class


def _passed_on(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tool with the signature and docstring of an inner method, which it calls."""
    if inspect.iscoroutinefunction(inspect.unwrap(method)):

        @functools.wraps(method)
        async def call_async(self: _Adapter, *args: Any, **kwargs: Any) -> Any:
            return await method(self._inner, *args, **kwargs)

        return tool(call_async)

    @functools.wraps(method)
    def call(self: _Adapter, *args: Any, **kwargs: Any) -> Any:
        return method(self._inner, *args, **kwargs)

    return tool(call)


def _class_of(function: Callable[[], Environment], kind: type[Environment]) -> type[Environment]:
    """Return a class whose instances a function makes."""

    def new(cls: type[Environment]) -> Environment:
        return function()

    return type(kind.__name__, (kind,), {"__new__": new, "__init__": lambda self: None})
