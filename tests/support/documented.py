"""Docstrings for functions of tests that are tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def documented(function: Function) -> Function:
    """Give a tool the docstring that it needs: a line, and one for each argument but `self`."""
    lines = [f"    {name}: what." for name in inspect.signature(function).parameters if name != "self"]
    function.__doc__ = "\n".join(["Do it.", "", *(["Args:", *lines] if lines else [])])
    return function
