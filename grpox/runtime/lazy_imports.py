"""Keeps out of a run's start what transformers and DeepSpeed import for functions that grpox never calls.

Importing that was a quarter of the start. Whoever does call such a function has it imported then.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def late(module: str, function: str) -> Iterator[None]:
    """Within it, `from module import function` gets one that imports `module` when it is called."""
    if module in sys.modules:
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    stand_in = ModuleType(module)
    setattr(stand_in, function, call)
    sys.modules[module] = stand_in
    try:
        yield
    finally:
        del sys.modules[module]


@contextmanager
def absent(module: str) -> Iterator[None]:
    """Within it, importing `module` fails as if it were not installed, unless it has been imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # Python's own way to say so
    try:
        yield
    finally:
        del sys.modules[module]


def compiled_at_first_call(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As `torch.compile`, which imports the compiler for seconds, but not before the function is called."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
