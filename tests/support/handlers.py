"""Signal handlers that a command sets in its process, put back for the tests that come after it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers of Ctrl-C and of an order to end back when the block ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
