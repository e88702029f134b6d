"""Which of a run's checkpoints is the best, by the metric that `checkpoint.best` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.checkpoint.progress import Progress
from grpox.config import CheckpointConfig

LARGEST = ("highest", "max")


@dataclass(frozen=True)
class Best:
    """A checkpoint, and why it is the best."""

    folder: Path
    step: int
    metric: str
    value: float

    def summary(self) -> dict[str, Any]:
        """What the run's summary tells of it."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "checkpoint": str(self.folder)}


def best_of(found: Sequence[Path], config: CheckpointConfig) -> Best | None:
    """The best of the checkpoints `found`, newest first; of equal ones the newest.

    A checkpoint counts by the metrics of its step and of the evaluation after it. One that has no such metric,
    or has it as not-a-number, is never the best.
    """
    if config.best is None:
        return None
    held = [(folder, Progress.read(folder)) for folder in found]
    rated = [
        Best(folder, progress.step, config.best, progress.metrics[config.best])
        for folder, progress in held
        if progress.metrics.get(config.best, float("nan")) == progress.metrics.get(config.best)
    ]
    sign = 1 if config.best_is in LARGEST else -1
    return max(rated, key=lambda best: sign * best.value, default=None)
