"""Values of a growing file of metrics, read once and kept as arrays of numbers."""

from __future__ import annotations

import errno
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grpox.observing.record_files import MetricsLine
from grpox.runtime.files import open_regular

Numbers = NDArray[np.float64]

PIECE = 1 << 20
"""Bytes that are read at a time: a part of a second of parsing."""
LONGEST = 16 << 20
"""Longest line in bytes."""
_TAIL = 64
"""Bytes before the position that tell whether the file is still the one that was read."""


class Column:
    """The values of one metric.

    Args:
        steps: step of each line of the file, which grows.
    """

    def __init__(self, steps: array[float]) -> None:
        self._steps = steps
        self._lines: array[int] = array("i")  # place in `steps` of each value
        self._values: array[float] = array("d")

    def append(self, line: int, value: float) -> None:
        """Add the value of a line."""
        self._lines.append(line)
        self._values.append(value)

    @property
    def first(self) -> float:
        """The value of the first line."""
        return self._values[0]

    @property
    def last(self) -> float:
        """The value of the last line."""
        return self._values[-1]

    def curve(self, line: int = 0) -> tuple[Numbers, Numbers]:
        """Return steps and values from a line on: steps ascend, and of a repeated one the last value counts."""
        start = bisect_left(self._lines, line)
        # Copies: an array cannot grow while numpy sees it.
        steps, values = np.array(self._steps)[self._lines[start:]], np.array(self._values[start:])
        if not np.any(steps[1:] <= steps[:-1]):
            return steps, values
        order = np.argsort(steps, kind="stable")  # a resumed run, or a full disk
        steps, values = steps[order], values[order]
        is_last = np.append(steps[1:] != steps[:-1], True)
        return steps[is_last], values[is_last]


class MetricsColumns:
    """Reads a file of metrics line by line while another process appends to it.

    Half a line at the end waits for its rest. A file that became shorter, or that was replaced, is read again:
    a run was resumed, or another one began.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""
        """Reason why the file cannot be read."""
        self.generation = 0
        """Number of times that the file was begun anew."""
        self._begin()

    def _begin(self) -> None:
        self.position = 0
        """Bytes read: the end of the last whole line."""
        self.columns: dict[str, Column] = {}
        """Name -> values; those of evaluations are below ``evaluation/``."""
        self._steps: array[float] = array("d")  # of each line; NaN for one that is no metrics
        self.times = Column(self._steps)
        """Unix seconds of each optimizer step."""
        self.damaged: dict[int, str] = {}
        """Number, from 1, of each line that is no metrics -> what is wrong with it."""
        self.began = self.ended = math.nan
        """Unix seconds of the first and the last line."""
        self.step = 0
        """Last optimizer step."""
        self.seconds = 0.0
        """Seconds of all steps and of the evaluations between them, without pauses before a resume."""
        self._ends: array[int] = array("q")
        self._tail = b""

    def read(self) -> None:
        """Read what is new."""
        try:
            with open_regular(self._path) as file:
                file.seek(self.position - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._restart()
                    file.seek(0)
                rest = b""
                while piece := file.read(PIECE):
                    rest = self._parse(rest + piece)
                    if len(rest) > LONGEST:
                        raise OSError(errno.EFBIG, f"has a line of more than {LONGEST >> 20} MiB")
            self.problem = ""
        except FileNotFoundError:
            if self.position:
                self._restart()
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"

    def line_at(self, position: int) -> int:
        """Return the number of the first line that ends after a position."""
        return bisect_right(self._ends, position)

    def _restart(self) -> None:
        self.generation += 1
        self._begin()

    def _parse(self, text: bytes) -> bytes:
        """Take over the whole lines of a text, and return the rest."""
        end = text.rfind(b"\n") + 1
        for line in text[:end].split(b"\n")[:-1]:
            self.position += len(line) + 1
            self._ends.append(self.position)
            self._steps.append(math.nan)
            if line.strip():
                self._take(line, len(self._ends))
        if end:
            self._tail = (self._tail + text[:end])[-_TAIL:]
        return text[end:]

    def _take(self, line: bytes, number: int) -> None:
        try:
            parsed = MetricsLine.parse(line)
        except ValueError as error:
            self.damaged[number] = str(error)
            return
        since = max(0.0, parsed.time - self.ended) if math.isfinite(self.ended) else 0.0
        if not parsed.is_evaluation:
            self.seconds += parsed.values.get("step_time", since)
        elif parsed.step == self.step > 0:
            self.seconds += since
        self.began = parsed.time if math.isnan(self.began) else min(self.began, parsed.time)
        self.ended = parsed.time
        if not parsed.is_evaluation:
            self.step = parsed.step
            self.times.append(number - 1, parsed.time)
        self._steps[-1] = parsed.step
        # Most of the time of a long run's page is spent here.
        for name, value in parsed.named_values.items():
            if (column := self.columns.get(name)) is None:
                column = self.columns[name] = Column(self._steps)
            column.append(number - 1, value)


def decimate(steps: Numbers, values: Numbers, points: int) -> tuple[Numbers, Numbers]:
    """Reduce a curve to about `points` points: the lowest and the highest value of each of equal pieces.

    The first and the last point stay. A piece without a finite value keeps one point that is not finite.
    """
    count = len(steps)
    if count <= max(points, 4):
        return steps, values
    buckets = max(1, (points - 2) // 2)
    size = math.ceil(count / buckets)
    missing = size * math.ceil(count / size) - count
    is_finite = np.isfinite(values)
    low, high = np.where(is_finite, values, np.inf), np.where(is_finite, values, -np.inf)
    low, high = (
        np.append(each, np.full(missing, edge)).reshape(-1, size)
        for each, edge in ((low, np.inf), (high, -np.inf))
    )
    starts = np.arange(len(low)) * size
    picked = np.concatenate([starts + low.argmin(1), starts + high.argmax(1), [0, count - 1]])
    picked = np.unique(picked)
    return steps[picked], values[picked]


def window(steps: Numbers, values: Numbers, first: float | None, last: float | None) -> tuple[Numbers, Numbers]:
    """Cut a curve to the steps from `first` to `last`, both included."""
    start = 0 if first is None else int(np.searchsorted(steps, first, "left"))
    stop = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    return steps[start:stop], values[start:stop]


def plain(values: Sequence[float] | Numbers) -> list[float | None]:
    """Return a list for JSON: None for what is not finite, and whole numbers as integers."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < 1e15 else value
        for value in map(float, values)
    ]
