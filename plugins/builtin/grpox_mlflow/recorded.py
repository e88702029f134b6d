"""A run's metrics.jsonl as MLflow takes it: every value with the step and the time at which it was recorded.

The files below ``system/`` are read in the same way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox_mlflow.naming import Names

if TYPE_CHECKING:
    from mlflow.entities import Metric

FILE = "metrics.jsonl"
SYSTEM = "system"
"""Folder of what each machine of the run recorded of itself, in the same form."""


class RecordedMetrics:
    """Reads the file from its start, a piece at a time, so that memory does not grow with what waits.

    A line that is not complete yet is left for later; one that is no JSON, because the process that wrote it
    was killed, is passed over.
    """

    def __init__(self, folder: Path, name: str = FILE) -> None:
        self._path = folder / name
        self._names = Names()
        self.position = 0
        """Bytes that are done with."""

    def next(self, most: int) -> tuple[list[Metric], int]:
        """The values of the next lines, at most `most` unless one line has more, and where they end.

        Nothing moves on until `position` is set to that end.
        """
        values: list[Metric] = []
        end = self.position
        if not self._path.exists():
            return values, end
        with self._path.open("rb") as file:
            file.seek(end)
            while (line := file.readline()).endswith(b"\n"):
                found = self._values(line)
                if values and len(values) + len(found) > most:
                    break
                values += found
                end += len(line)
        return values, end

    @property
    def size(self) -> int:
        """Bytes that there are."""
        return self._path.stat().st_size if self._path.exists() else 0

    def lines_left(self) -> int:
        """Steps and evaluations that are not done with."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(self.position)
            return sum(1 for _ in file)

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
