"""Tools of environments: which methods the model may call, and what is wrong with one."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any

import pytest
from support.documented import documented

from grpox.environments import Environment, tool
from grpox.environments.contract import CONTRACT, as_function, environment_problem, tool_problem, tools_of
from grpox.environments.schemas import tool_schema
from grpox.environments.tools import Tool


class Base(Environment):
    @tool
    def second(self) -> None:
        """Do."""

    @tool
    def first(self) -> None:
        """Do."""

    def helper(self) -> None:
        """No tool."""


class Child(Base):
    first = None  # type: ignore[assignment]

    def second(self) -> None:
        """Do otherwise."""

    @tool
    @staticmethod
    @documented
    def third(x: int) -> int: ...


def test_tools_are_marked_in_order_and_an_overridden_one_is_one_and_none_removes_it() -> None:
    assert list(tools_of(Base)) == ["second", "first"]
    assert list(tools_of(Child)) == ["second", "third"]
    assert tools_of(Child)["second"] is Child.second
    assert environment_problem(Child) == ""
    assert {"reset", "reply", "reward", "close", "done", "state_key"} <= set(CONTRACT)


@documented
def of_hints(a: int, *, b: str = "") -> None: ...


@documented
def of_positions(a: int, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "told"),
    [
        (of_positions, "of_positions", "has the positional-only parameter 'a'"),
        (3, "x", "is no function"),
        (max, "max", "has no signature that Python can read"),
        *((of_hints, name, "has the name") for name in ("_hidden", "<lambda>", "9x", "a b")),
    ],
)
def test_a_tool_that_cannot_be_described_to_the_model_is_named(function: Any, name: str, told: str) -> None:
    assert tool_problem(function, name).startswith(told)
    assert tool_problem(of_hints, "of_hints") == ""


class Adder:
    """Adds up."""

    sum = 0

    @documented
    def __call__(self, a: int) -> int:
        self.sum += a
        return self.sum


@documented
async def scaled(a: int, factor: int, offset: int = 0) -> int:
    return a * factor + offset


@functools.lru_cache
@documented
def cached(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("target", "name", "parameters", "answer"),
    [
        (Adder(), "Adder", {"a"}, 3),
        (functools.partial(scaled, factor=5), "scaled", {"a", "offset"}, 15),
        (functools.partial(Adder()), "Adder", {"a"}, 3),
        (cached, "cached", {"a"}, 3),
    ],
)
def test_what_can_be_called_is_a_tool(target: Any, name: str, parameters: set[str], answer: int) -> None:
    function = as_function(target)
    assert (function.__name__, tool_problem(function, name)) == (name, "")
    schema = tool_schema(function, name)["function"]
    assert set(schema["parameters"]["properties"]) == parameters
    assert schema["parameters"]["required"] == ["a"]
    called = Tool(name, function)
    assert called.arguments('{"a": "3"}')["a"] == 3
    with pytest.raises(ValueError, match="Unexpected keyword argument"):
        called.arguments('{"a": 3, "factor": 9}')
    value = function(a=3)
    assert called.is_async == inspect.isawaitable(value)
    assert (asyncio.run(value) if inspect.iscoroutine(value) else value) == answer
