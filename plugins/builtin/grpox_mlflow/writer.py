"""One background thread that brings a tracking store up to date, so that a slow or dead one delays no step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
INTERVAL, LONGEST = 1.0, 30.0
"""Seconds from the end of one writing to the next, at least and at most."""
SHARE = 0.1
"""Of the time in between, what writing may take: it takes the interpreter's lock, which the run would have."""


class Writer:
    """Calls `write` in a thread of its own whenever it is woken; after an error again, until it succeeds.

    Nothing is queued: what is to be written lies on the disk, and `write` knows how far it came.

    Args:
        write: writes all that there is.
        pauses: seconds after the first, second, ... error in a row; then the last of them again and again.
    """

    def __init__(self, write: Callable[[], object], pauses: tuple[float, ...] = PAUSES) -> None:
        self._write = write
        self._pauses = pauses
        self._error: Exception | None = None
        self._due, self._closing, self._stopped = threading.Event(), threading.Event(), threading.Event()
        # A daemon: a server that hangs must not keep the process from ending once `close` gave up.
        self._thread = threading.Thread(target=self._work, name="mlflow-writer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to write; never blocks."""
        self._due.set()

    def take_error(self) -> Exception | None:
        """The first error of those in a row, once; or None."""
        error, self._error = self._error, None
        return error

    def close(self, seconds: float, progress: Callable[[], None]) -> bool:
        """Write what is there a last time, in at most `seconds`; then stop.

        `progress` is called every 5 s. Returns whether all was written in time.
        """
        self._closing.set()
        self._due.set()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(5.0, left))
            if self._thread.is_alive() and time.monotonic() < deadline:
                progress()
        in_time = not self._thread.is_alive()
        self._stopped.set()
        return in_time

    def _work(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            self._due.wait()
            self._due.clear()
            closing, start = self._closing.is_set(), time.monotonic()
            try:
                self._write()
                if closing:
                    return
                failures = 0
                self._closing.wait(min(max(INTERVAL, (time.monotonic() - start) / SHARE), LONGEST))
            except Exception as error:  # noqa: BLE001 - handed to the thread that wakes this one
                if failures == 0:
                    self._error = error
                failures += 1
                self._pause(self._pauses[min(failures, len(self._pauses)) - 1])
                self._due.set()

    def _pause(self, seconds: float) -> None:
        """Shorter once it is time to close."""
        if not self._closing.wait(seconds):
            return
        self._stopped.wait(min(seconds, self._pauses[0]))
