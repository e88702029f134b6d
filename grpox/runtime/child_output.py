"""Passes on the output of child processes, up to a limit for each call."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

MOST_PRINTED = 1 << 20
"""Bytes of a call that are passed on, of both streams together."""
PIPE = 1 << 16
"""Bytes that are read at a time: all that a pipe holds."""


class ChildOutput:
    """Reads both streams of one process in a thread of its own, so that printing never blocks the process.

    Beyond the limit everything is read too, and dropped. The thread ends once nobody holds the other ends: the
    process and those that it has started.

    Args:
        source: name in the line about dropped output: ``reward 'judge'``.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._left = MOST_PRINTED
        self._dropped = 0
        self._in_line = False
        """True where the last byte that was passed on ends no line."""
        out, self.stdout = os.pipe()
        err, self.stderr = os.pipe()
        self._streams = {out: 1, err: 2}  # end to read -> where the trainer prints
        for end in self._streams:
            os.set_blocking(end, False)

    def start(self) -> None:
        """Begin to read; `stdout` and `stderr` are the process's alone from here on."""
        os.close(self.stdout)
        os.close(self.stderr)
        threading.Thread(target=self._follow, name="grpox-child-output", daemon=True).start()

    def end_call(self) -> None:
        """Pass on what the process has printed so far, tell how much was dropped, and begin to count anew."""
        with self._lock:
            for end in list(self._streams):
                self._read(end)
            if self._dropped:
                begin = "\n" if self._in_line else ""
                note = f"{self._dropped:,} further bytes that {self._source} printed in this call"
                _write(2, f"{begin}... {note} are not shown\n".encode())
            self._left, self._dropped, self._in_line = MOST_PRINTED, 0, False

    def _follow(self) -> None:
        # poll, not select, which fails on file descriptors above 1023.
        poller = select.poll()
        for end in self._streams:
            poller.register(end, select.POLLIN)
        while self._streams:
            ready = poller.poll()
            with self._lock:
                for end, _ in ready:
                    if self._read(end):
                        poller.unregister(end)
                        del self._streams[end]
                        os.close(end)

    def _read(self, end: int) -> bool:
        """Pass on what is there; return True at the end of the stream."""
        try:
            read = os.read(end, PIPE)
        except BlockingIOError:  # the other thread was first
            return False
        shown = read[: self._left]
        self._left -= len(shown)
        self._dropped += len(read) - len(shown)
        if shown:
            self._in_line = not shown.endswith(b"\n")
            _write(self._streams[end], shown)
        return not read


def _write(descriptor: int, data: bytes) -> None:
    """Write all; where nobody reads the trainer's output, or it has none, it is lost."""
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
