"""Limits of waits in tests: seconds on a quiet machine, scaled by the speed of this one."""

from __future__ import annotations

import functools
import os
import time

QUIET = 0.25
"""Seconds that `_work` takes on a quiet core of the machine on which the waits were chosen."""


def patient(seconds: float) -> float:
    """Return how long to wait here for what takes at most `seconds` on a quiet machine.

    Nothing is asserted with it: it only ends a wait for something that does not come.
    """
    return seconds * factor()


@functools.cache
def factor() -> float:
    """Return how much longer things may take here: four times what they take at present, and at least 4.

    ``GRPOX_TESTS_PATIENCE`` sets it.
    """
    if given := os.environ.get("GRPOX_TESTS_PATIENCE"):
        return float(given)
    started = time.perf_counter()
    _work()
    return max(1.0, (time.perf_counter() - started) / QUIET) * 4


def _work() -> None:
    total = 0
    for number in range(5_000_000):
        total += number
