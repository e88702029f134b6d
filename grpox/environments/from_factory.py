"""Environments in TRL's form, run as they are: a class, or a function that returns an instance.

Its form: ``reset(**row)`` returns None, or text that continues the last message of the prompt; every other
public method is a tool, also a static one, but none of the class; ``get_reward()``, if it is there, returns the
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
    sample = target if inspect.isclass(target) else target()
    kind = sample if inspect.isclass(sample) else type(sample)
    if issubclass(kind, Environment):
        own = {"__new__": lambda _: target(), "__init__": lambda self: None}
        return type(kind.__name__, (kind,), own)
    if not callable(getattr(kind, "reset", None)):
        raise TypeError("has no method reset: it is no grpox.environments.Environment, and not in TRL's form")
    members = {
        name: _as_tool(inspect.getattr_static(kind, name))
        for name in dir(kind)
        if not name.startswith("_") and name not in OWN
    }
    tools = {
        APART + name if hasattr(Environment, name) else name: member
        for name, member in members.items()
        if member is not None
    }
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_factory": staticmethod(target),
    }
    # Without it, it provides no reward, and a run that needs one is refused.
    if callable(getattr(sample, "get_reward", None)):
        names["reward"] = _Adapter._reward
    return type(kind.__name__, (_Adapter,), {**tools, **names})


class _Adapter(Environment):
    """An environment in TRL's form; all names of its own begin with ``_``, as those of no tool do."""

    _factory: Callable[[], Any]

    def __init__(self) -> None:
        self._inner = type(self)._factory()
        if callable(getattr(self._inner, "get_reward", None)):  # the object may have it where the class has not
            vars(self)["reward"] = self._reward

    async def reset(self, row: Mapping[str, Any], seed: int) -> str | list[Mapping[str, Any]] | None:  # type: ignore[override]
        """Return what the inner `reset` does, as a continuation of the prompt."""
        observation = await _awaited(self._inner.reset(**row))
        return Appended(observation) if isinstance(observation, str) else observation

    async def _reward(self) -> float | None:
        """Return `get_reward()`."""
        reward: float | None = await _awaited(self._inner.get_reward())
        return reward

    async def close(self) -> None:  # type: ignore[override]
        """Close the inner environment if it can be closed."""
        close = getattr(self._inner, "close", None)
        if callable(close):
            await _awaited(close())


def written_as(kind: type[Environment], method: str) -> str:
    """Return the name that an author of the class gives a method of `Environment`.

    In TRL's form the reward is ``get_reward``, and there are no others: empty.
    """
    if not issubclass(kind, _Adapter):
        return method
    return "get_reward" if method == "reward" else ""


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _as_tool(member: Any) -> Any:
    """Return the tool that a public attribute of a class is; None if it is none.

    As in TRL 1.16 these are functions, static ones too; unlike there, also those in a wrapper that is bound as
    they are, such as functools.lru_cache.
    """
    if isinstance(member, staticmethod):
        return tool(staticmethod(member.__func__)) if inspect.isfunction(member.__func__) else None
    is_method = callable(member) and hasattr(type(member), "__get__")
    return _passed_on(member) if is_method and inspect.isfunction(inspect.unwrap(member)) else None


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
