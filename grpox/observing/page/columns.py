"""Values of a growing file of metrics, read once and kept as arrays of numbers."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpox.observing.record_files import MetricsLine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

PIECE = 1 << 20
"""Bytes that are read at a time: a part of a second of parsing."""
_TAIL = 64
"""Bytes before the position that tell whether the file is still the one that was read."""


@dataclass
class Column:
    """The values of one metric in the order of the file."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    """Number of each value's line in the file."""
    is_ordered: bool = True
    """False once a step is repeated or comes late: a resumed run, or a full disk."""

    def append(self, step: float, value: float, line: int) -> None:
        """Add the value of a line."""
        if self.steps and step <= self.steps[-1]:
            self.is_ordered = False
        self.steps.append(step)
        self.values.append(value)
        self.lines.append(line)

    def curve(self, line: int = 0) -> tuple[Numbers, Numbers]:
        """Return steps and values from a line on: steps ascend, and of a repeated one the last value counts."""
        import numpy as np

        start = bisect_left(self.lines, line)
        steps, values = np.array(self.steps[start:]), np.array(self.values[start:])
        if self.is_ordered or not len(steps):
            return steps, values
        order = np.argsort(steps, kind="stable")
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
        self.generation = 0
        """Number of times that the file was begun anew."""
        self._begin()

    def _begin(self) -> None:
        self.position = 0
        """Bytes read: the end of the last whole line."""
        self.columns: dict[str, Column] = {}
        """Name -> values; those of evaluations are below ``evaluation/``."""
        self.evaluated: set[str] = set()
        """Names in `columns` that evaluations logged."""
        self.times = Column()
        """Unix seconds of each optimizer step."""
        self.damaged: dict[int, str] = {}
        """Number, from 1, of each line that is no metrics -> what is wrong with it."""
        self.began = self.ended = math.nan
        """Unix seconds of the first and the last line."""
        self.step = 0
        """Last optimizer step."""
        self.seconds = 0.0
        """Seconds of all steps and of the evaluations between them, without pauses before a resume."""
        self._latest = [-math.inf, -math.inf]  # of steps, and of evaluations
        self._ends: array[int] = array("q")
        self._tail = b""

    def read(self) -> bool:
        """Read what is new; return True if there was anything."""
        before = (self.generation, self.position)
        try:
            with self._path.open("rb") as file:
                file.seek(self.position - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._restart()
                    file.seek(0)
                rest = b""
                while piece := file.read(PIECE):
                    rest = self._parse(rest + piece)
        except FileNotFoundError:
            if self.position:
                self._restart()
        return before != (self.generation, self.position)

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
            self.times.append(parsed.step, parsed.time, number - 1)
        step, columns, place = parsed.step, self.columns, number - 1
        is_late = step <= self._latest[parsed.is_evaluation]
        self._latest[parsed.is_evaluation] = max(step, self._latest[parsed.is_evaluation])
        # Most of the time of a long run's page is spent here.
        for name, value in parsed.named_values.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = Column()
                if parsed.is_evaluation:
                    self.evaluated.add(name)
            column.steps.append(step)
            column.values.append(value)
            column.lines.append(place)
            if is_late:
                column.is_ordered = False


def decimate(steps: Numbers, values: Numbers, points: int) -> tuple[Numbers, Numbers]:
    """Reduce a curve to about `points` points: the lowest and the highest value of each of equal pieces.

    The first and the last point stay. A piece without a finite value keeps one point that is not finite.
    """
    import numpy as np

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
    import numpy as np

    start = 0 if first is None else int(np.searchsorted(steps, first, "left"))
    stop = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    return steps[start:stop], values[start:stop]


def plain(values: Sequence[float] | Numbers) -> list[float | None]:
    """Return a list for JSON: None for what is not finite, and whole numbers as integers."""
    return [_plain(value) for value in map(float, values)]


def _plain(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
