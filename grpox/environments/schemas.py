"""Descriptions of tools for the model, from their signatures and docstrings; only the trainer imports this."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from grpox.environments.contract import attribute_of, is_method
from grpox.errors import ConfigError, describe

DOCUMENTED = (
    "type hints of str, int, float, bool, list, dict, Literal, or one of them | None; "
    "and under 'Args:' in the docstring a line 'name: ...' for each parameter"
)


def tool_schema(
    function: Callable[..., Any], name: str, key: str = "tools", is_method: bool = False
) -> dict[str, Any]:
    """Return the description of a tool as chat templates take it.

    Args:
        name: name for the model.
        key: key of the run file, for messages.
        is_method: True for a method in its class, whose first parameter is the instance.

    Raises:
        ConfigError: transformers cannot describe the signature, or the docstring lacks a parameter; the message
            names file and line.
    """
    from transformers.utils import get_json_schema

    # a method of an instance shows no `self`, whatever the class calls it
    described = MethodType(function, object()) if is_method else function
    try:
        schema: dict[str, Any] = get_json_schema(described)
    except Exception as error:
        what = f"tool '{name}' cannot be described to the model: {describe(error)}"
        raise ConfigError(what, key, where=place_of(function), allowed=DOCUMENTED) from error
    schema["function"]["name"] = name
    return schema


def method_schema(environment: type, name: str, key: str = "environment") -> dict[str, Any]:
    """Return the description of a tool that is a method of an environment's class; see `tool_schema`."""
    function = getattr(environment, attribute_of(environment, name))
    return tool_schema(function, name, key, is_method(environment, name))


def place_of(function: Callable[..., Any]) -> str:
    """Return file and line of a function, for messages; empty if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
