"""One background thread that performs writes in order, so that a slow tracking server delays no step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Write = Callable[[], object]


class Writer:
    """Performs submitted writes one after the other; a failing one is tried again, then given up.

    Errors do not vanish: the latest waits in `take_error` for the thread that submits.

    Args:
        is_passing: whether an error may pass by itself, so that trying again makes sense.
        limit: writes that may wait; more are refused.
        pauses: seconds before the second, third, ... attempt.
    """

    def __init__(
        self,
        is_passing: Callable[[Exception], bool],
        limit: int = 1000,
        pauses: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0),
    ) -> None:
        self.lost = 0
        """Writes given up, refused, or still waiting when `close` ran out of time."""
        self._is_passing = is_passing
        self._limit = limit
        self._pauses = pauses
        self._waiting: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._stopped = threading.Event()
        # A daemon: a server that hangs must not keep the process from ending once `close` gave up.
        self._thread = threading.Thread(target=self._work, name="mlflow-writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Writes not yet begun; while closing, those unfinished (the end mark counts for the one at work)."""
        return self._waiting.qsize()

    def submit(self, write: Write) -> None:
        """Queue `write`; never blocks. A full queue refuses it, which `take_error` then tells."""
        if self.waiting >= self._limit:
            self.lost += 1
            self._error = RuntimeError(f"{self._limit} writes are waiting already: one was refused")
        else:
            self._waiting.put(write)

    def take_error(self) -> Exception | None:
        """The latest error since the last call, or None."""
        error, self._error = self._error, None
        return error

    def close(self, seconds: float, last: Write, progress: Callable[[int], None]) -> bool:
        """Perform what is waiting, then `last` (never refused), in at most `seconds`; then stop.

        `progress` is told the number of waiting writes every 5 s. Returns whether all was performed in time.
        """
        self._waiting.put(last)
        self._waiting.put(None)
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(5.0, left))
            if self._thread.is_alive():
                progress(self.waiting)
        in_time = not self._thread.is_alive()
        self._stopped.set()
        if not in_time:
            self.lost += self.waiting
        return in_time

    def _work(self) -> None:
        while not self._stopped.is_set() and (write := self._waiting.get()) is not None:
            self._attempt(write)

    def _attempt(self, write: Write) -> None:
        for pause in (*self._pauses, None):
            try:
                write()
                return
            except Exception as error:  # noqa: BLE001 - handed to the submitting thread, whatever it is
                self._error = error
                if pause is None or not self._is_passing(error) or self._stopped.wait(pause):
                    break
        self.lost += 1
