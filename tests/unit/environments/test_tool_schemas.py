"""Descriptions of tools for the model."""

import inspect
from typing import Literal

import pytest

from grpox.environments import Environment, tool
from grpox.environments.schemas import method_schema, tool_schema
from grpox.errors import ConfigError


def search(query: str, limit: int = 3) -> str:
    """Search the notes.

    Args:
        query: words to look for.
        limit: most results.
    """
    return query * limit


class Lake(Environment):
    @tool
    def move(self, direction: Literal["up", "down"]) -> str:
        """Walk one field.

        Args:
            direction: where to.
        """
        return direction

    @tool
    async def wait(this) -> str:
        """Do nothing."""
        return ""

    @tool
    @staticmethod
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: another.
        """
        return a + b

    @tool
    @classmethod
    def name(cls, long: bool) -> str:
        """Name the lake.

        Args:
            long: in full.
        """
        return ""


def test_a_function_is_described_as_transformers_does():
    assert tool_schema(search, "find")["function"] == {
        "name": "find",
        "description": "Search the notes.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "words to look for."},
                "limit": {"type": "integer", "description": "most results."},
            },
            "required": ["query"],
        },
        "return": {"type": "string"},
    }


def test_a_method_is_described_without_its_instance():
    parameters = {
        name: method_schema(Lake, name)["function"]["parameters"] for name in ("move", "wait", "add", "name")
    }
    assert parameters["move"] == {
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": ["up", "down"], "description": "where to."}},
        "required": ["direction"],
    }
    assert parameters["wait"] == {"type": "object", "properties": {}}
    assert list(parameters["add"]["properties"]) == ["a", "b"]
    assert list(parameters["name"]["properties"]) == ["long"]


def undescribed(query: str, limit: int = 3) -> str:
    """Search.

    Args:
        query: words.
    """
    return query


def untyped(query) -> str:
    """Search.

    Args:
        query: words.
    """
    return query


def unknown(query: "Nowhere") -> str:  # noqa: F821
    """Search.

    Args:
        query: words.
    """
    return query


@pytest.mark.parametrize(
    ("function", "problem"),
    [(undescribed, "argument 'limit'"), (untyped, "query is missing a type hint"), (unknown, "'Nowhere'")],
)
def test_a_tool_that_cannot_be_described_is_named_with_file_line_and_cure(function, problem):
    with pytest.raises(ConfigError) as refused:
        tool_schema(function, "find", "tools[0]")
    (what,) = refused.value.problems
    assert "tool 'find' cannot be described to the model" in what.what
    assert problem in what.what
    assert what.where == f"{__file__}:{inspect.getsourcelines(function)[1]}"
    assert (what.key, "Literal" in what.allowed) == ("tools[0]", True)
