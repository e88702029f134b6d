"""Keeps out of a run's start what transformers and DeepSpeed import for functions that grpox never calls.

Importing that was a quarter of the start. Whoever does call such a function has it imported then.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def _replaced(module: str, stand_in: ModuleType | None) -> Iterator[None]:
    """Within it, `module` is another, unless it has been imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = stand_in  # type: ignore[assignment]  # None is Python's own way to say: not installed
    try:
        yield
    finally:
        del sys.modules[module]


def late(module: str, function: str) -> AbstractContextManager[None]:
    """Within it, `from module import function` gets one that imports `module` when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    stand_in = ModuleType(module)
    setattr(stand_in, function, call)
    return _replaced(module, stand_in)


def absent(module: str) -> AbstractContextManager[None]:
    """Within it, importing `module` fails as if it were not installed, unless it has been imported."""
    return _replaced(module, None)


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
