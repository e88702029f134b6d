"""A run's metrics.jsonl as MLflow takes it: every value with its step and time, in requests that MLflow takes.

The files below ``system/`` are read in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpox_mlflow.naming import Names

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param

    Entity = TypeVar("Entity", Metric, Param)

FILE = "metrics.jsonl"
SYSTEM = "system"
"""Folder of what each machine of the run recorded of itself, in the same form."""

PARAMS_PER_BATCH = 100
"""MLflow's limit for one request."""
BYTES_PER_REQUEST = 900_000
"""MLflow refuses a request of more than a million."""
_OVERHEAD = 150
"""Bytes of a metric or parameter besides its name and text: numbers, names of fields, punctuation."""


class RecordedLines:
    """Reads a file of JSON lines a piece at a time, so that memory does not grow with what waits."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        # A run that went back to a checkpoint has a shorter file.
        self.position = min(position, self.size)
        """Bytes that are done with."""

    @property
    def size(self) -> int:
        """Bytes that there are."""
        return self._path.stat().st_size if self._path.exists() else 0

    def left(self) -> int:
        """Count the lines that are not done with."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(self.position)
            return sum(1 for _ in file)

    def lines(self) -> Iterator[tuple[bytes, int]]:
        """Yield each line that is not done with and where it ends, but for one that is not complete yet."""
        if self.position >= self.size:
            return
        with self._path.open("rb") as file:
            end = file.seek(self.position)
            while (line := file.readline()).endswith(b"\n"):
                end += len(line)
                yield line, end


class RecordedMetrics(RecordedLines):
    """Values of a file's lines; a line that is no JSON, because its process was killed, is passed over."""

    def __init__(self, folder: Path, name: str = FILE) -> None:
        super().__init__(folder / name)
        self._names = Names()

    def next(self, most: int) -> tuple[list[Metric], int]:
        """The values of the next lines, at most `most` unless one line has more, and where they end.

        Nothing moves on until `position` is set to that end.
        """
        values: list[Metric] = []
        end = self.position
        for line, line_end in self.lines():
            found = self._values(line)
            if values and len(values) + len(found) > most:
                break
            values += found
            end = line_end
        return values, end

    def _values(self, line: bytes) -> list[Metric]:
        from mlflow.entities import Metric

        try:
            told: dict[str, Any] = json.loads(line)
            kind, prefix = ("evaluation", "evaluation/") if "evaluation" in told else ("metrics", "")
            time, step = int(told["time"] * 1000), told["step"]
            found = [(prefix + name.removeprefix(prefix), float(told[kind][name])) for name in told[kind]]
        except (ValueError, TypeError, KeyError):
            return []
        return [Metric(self._names[name], value, time, step) for name, value in found]


def in_requests(entities: Sequence[Entity], most: int) -> Iterator[list[Entity]]:
    """`entities` in order, at most `most` of them in a request, and no more than fit into one."""
    batch: list[Entity] = []
    size = 0
    for entity in entities:
        # As JSON, which writes a letter outside ASCII in up to twelve bytes.
        own = len(json.dumps([entity.key, entity.value])) + _OVERHEAD
        if batch and (len(batch) == most or size + own > BYTES_PER_REQUEST):
            yield batch
            batch, size = [], 0
        batch.append(entity)
        size += own
    if batch:
        yield batch
