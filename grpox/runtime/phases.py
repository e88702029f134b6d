"""The phases of a step: which one this process is in, and the seconds that each took."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpox.runtime.logs import get_logger
from grpox.runtime.out_of_memory import memory_told

logger = get_logger(__name__)
WAITING = "gather"
"""The phase in which a rank waits for the others."""


@dataclass
class PhaseTimes:
    """Wall-clock seconds of each phase since the last `take`, and which phase it is now."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    generator: str = ""
    """Settings that make the run's generator need less memory, for messages."""
    failed: str = "none"
    """The phase in which the last exception was raised."""
    _error: BaseException | None = None
    _now: tuple[str, float] = field(default_factory=lambda: ("between phases", time.perf_counter()))
    """One tuple, so that another thread reads what belongs together."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, around = time.perf_counter(), self._now[0]
        self._now = name, start
        try:
            with memory_told(name, self.generator):
                yield
        except BaseException as error:
            if error is not self._error:  # else it comes from a phase within this one
                self.failed, self._error = name, error
            raise
        finally:
            end = time.perf_counter()
            self.seconds[name] += end - start
            logger.debug("phase %s took %.3f s", name, end - start)
            self._now = around, end

    def now(self) -> tuple[str, float]:
        """The phase under way, and when this or a phase within it last began or ended, by perf_counter."""
        return self._now

    def take(self) -> dict[str, float]:
        """The seconds of every phase as metrics ``time/<phase>``; counting starts over."""
        taken = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken
