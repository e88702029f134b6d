"""Peak memory over a period: processes and /dev/shm, above their values at its start."""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from collections.abc import Sequence
from types import TracebackType

import psutil

EVERY = 0.005
"""Seconds between two looks, besides what a look takes."""
SHARED_MEMORY = "/dev/shm"


class MemoryPeak:
    """Samples in a thread while the block runs; afterwards `private` and `shared` are bytes above the start.

    Private memory is USS, what ending the process would free; its processes are summed at each look.

    Args:
        pids: the processes, this one where none is named.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._processes = [psutil.Process(pid) for pid in pids] or [psutil.Process()]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.private = self.shared = 0

    def __enter__(self) -> MemoryPeak:
        gc.collect()
        # What the allocator keeps for later would hide what is taken anew.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._start = self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(EVERY):
            private, shared = self._look()
            self.private = max(self.private, private - self._start[0])
            self.shared = max(self.shared, shared - self._start[1])

    def _look(self) -> tuple[int, int]:
        private = sum(process.memory_full_info().uss for process in self._processes)
        return private, shutil.disk_usage(SHARED_MEMORY).used
