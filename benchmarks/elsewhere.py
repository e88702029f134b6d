"""Seconds that a run spends outside of the framework: in DeepSpeed and the model in it, generator, rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

seconds = 0.0
_depth = 0


@contextmanager
def counted() -> Iterator[None]:
    """Count the block; what is within another that counts is counted once."""
    global seconds, _depth
    _depth += 1
    start = time.perf_counter()
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            seconds += time.perf_counter() - start


def count(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, its calls counted."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        with counted():
            return function(*args, **kwargs)

    return counting
