"""The file of metrics: lines that are appended whole, and wait in memory while the disk has no room."""

from __future__ import annotations

import os
from collections import deque
from io import FileIO
from pathlib import Path


class MetricsFile:
    """Appends lines in order. One that cannot be written now is written with the next one that can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[str] = deque()

    @property
    def waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._waiting)

    def append(self, line: str) -> None:
        """Write what waits, then `line`; in the file when this returns.

        Raises:
            OSError: there is no room. The line waits, and the file holds no part of it.
        """
        self._waiting.append(line)
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits; raises OSError as `append` does."""
        if not self._waiting:
            return
        with self.path.open("ab", buffering=0) as file:
            while self._waiting:
                _append_whole(file, self._waiting[0].encode() + b"\n")
                self._waiting.popleft()


def _append_whole(file: FileIO, line: bytes) -> None:
    before = file.seek(0, os.SEEK_END)
    rest = memoryview(line)
    try:
        while rest:  # on a disk that is nearly full a part is written first
            rest = rest[file.write(rest) or 0 :]
    except BaseException:
        file.truncate(before)
        raise
