"""JSON lines of a run's files, read in pieces, and requests of a size that MLflow accepts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from grpox.toolkit import MetricsLine, open_regular
from grpox_mlflow.naming import MlflowNames

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param

    Entity = TypeVar("Entity", Metric, Param)
Item = TypeVar("Item")

METRICS, SYSTEM = "metrics.jsonl", "system"
"""The run's file of metrics, and the folder with the system metrics of each machine in the same form."""
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
"""MLflow's limits for one request."""
BYTES_PER_REQUEST = 900_000
"""Largest request in bytes; MLflow refuses requests above a million."""


def whole_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the lines after byte `start`, each with its end; a missing file has none.

    A process that was killed may have left half of the last line, which is left out.
    """
    if path.is_file():
        with open_regular(path) as file:
            file.seek(start)
            for line in file:
                if line.endswith(b"\n"):
                    start += len(line)
                    yield line, start


class RecordedLines(Generic[Item]):
    """Reads a file of JSON lines in pieces, so that memory does not grow with the amount of unread data.

    Args:
        read: returns the items of a line; raises ValueError for a line that is none, which is passed over.
        most: largest number of items of a piece, unless one line has more.
        position: bytes already read.
    """

    def __init__(self, path: Path, read: Callable[[bytes], list[Item]], most: int, position: int = 0) -> None:
        self._path, self._read, self._most = path, read, most
        self.position = min(position, self.size)  # the file may have been removed

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._path.stat().st_size if self._path.exists() else 0

    def left(self) -> int:
        """Count the lines after `position`."""
        return sum(1 for _ in whole_lines(self._path, self.position))

    def pieces(self) -> Iterator[tuple[list[Item], int]]:
        """Yield items of the next lines and the position of their end; `position` moves there with the next
        request."""
        items: list[Item] = []
        end = self.position
        for line, line_end in whole_lines(self._path, end):
            try:
                of_line = self._read(line)
            except ValueError:
                of_line = []
            if items and len(items) + len(of_line) > self._most:
                yield items, end
                self.position, items = end, []
            items += of_line
            end = line_end
        if end > self.position:
            yield items, end
            self.position = end


def recorded_metrics(path: Path) -> RecordedLines[Metric]:
    """Read every value of a file of metrics with its step and time; those of evaluations as
    ``evaluation/...``."""
    names = MlflowNames()

    def read(line: bytes) -> list[Metric]:
        from mlflow.entities import Metric

        parsed = MetricsLine.parse(line)
        milliseconds, values = int(parsed.time * 1000), parsed.named_values
        return [Metric(names[name], value, milliseconds, parsed.step) for name, value in values.items()]

    return RecordedLines(path, read, METRICS_PER_BATCH)


def in_requests(entities: Sequence[Entity], most: int) -> Iterator[list[Entity]]:
    """Split `entities` into requests, in order: at most `most` in each, and no request above the size limit."""
    batch: list[Entity] = []
    size = 0
    for entity in entities:
        # As JSON, where a letter outside ASCII takes up to twelve bytes, with 150 for numbers and field names.
        own = len(json.dumps([entity.key, entity.value])) + 150
        if batch and (len(batch) == most or size + own > BYTES_PER_REQUEST):
            yield batch
            batch, size = [], 0
        batch.append(entity)
        size += own
    if batch:
        yield batch
