"""Postpones imports that transformers and DeepSpeed need only for functions that grpox never calls.

These imports took a quarter of a run's start-up. They now happen when such a function is called.
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
    """Replace `module` within the block, unless it is already imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = stand_in  # type: ignore[assignment]  # None is Python's own way to say: not installed
    try:
        yield
    finally:
        del sys.modules[module]


def late(module: str, function: str) -> AbstractContextManager[None]:
    """Make `from module import function` in the block return a function that imports `module` when called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    stand_in = ModuleType(module)
    setattr(stand_in, function, call)
    return _replaced(module, stand_in)


def absent(module: str) -> AbstractContextManager[None]:
    """Make the import of `module` fail within the block as if not installed, unless it is already imported."""
    return _replaced(module, None)


def compiled_at_first_call(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Replace `torch.compile`, whose import takes seconds, and import the compiler when the function is
    called."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
