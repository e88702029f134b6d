"""The course of a metric: first, last and outermost values, and a line of blocks for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpox.errors import ConfigError, Problem, nearest
from grpox_mlflow.runs.tracked import EVALUATION, Point, TrackedRun, figures, strict

if TYPE_CHECKING:
    from grpox_mlflow.runs.store import Store

ACCURACY = f"{EVALUATION}accuracy"
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""Eight heights, and what stands for them where the terminal's encoding has no blocks."""


@dataclass(frozen=True)
class Course:
    """A metric's values by step, at least one."""

    metric: str
    points: Sequence[Point]

    @property
    def first(self) -> Point:
        return self.points[0]

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def highest(self) -> Point:
        """The first of the highest; NaN is none, unless there is nothing else."""
        return max(self._numbers, key=lambda point: point.value)

    @property
    def lowest(self) -> Point:
        return min(self._numbers, key=lambda point: point.value)

    @property
    def _numbers(self) -> Sequence[Point]:
        return [point for point in self.points if not math.isnan(point.value)] or self.points

    def as_json(self) -> dict[str, object]:
        """First, last, lowest and highest, each ``{"step": ..., "value": ...}``."""
        told = {"first": self.first, "last": self.last, "lowest": self.lowest, "highest": self.highest}
        return {name: {"step": point.step, "value": strict(point.value)} for name, point in told.items()}


def main_metrics(run: TrackedRun) -> list[str]:
    """Those of the run that say how it went: reward, distance, length, gradient, and what was evaluated."""
    kl = "kl" if "kl" in run.last else "sampling/kl"
    of_steps = ("reward", kl, "completions/mean_length", "grad_norm")
    rewards = sorted(n for n in run.last if n.startswith(f"{EVALUATION}rewards/") and n.endswith("/mean"))
    evaluated = (ACCURACY, *rewards, f"{EVALUATION}completions/mean_length")
    return [name for name in (*of_steps, *evaluated) if name in run.last]


def evaluated_metric(run: TrackedRun) -> str | None:
    """The one that says what the evaluations found: the accuracy, else the first reward."""
    return next((name for name in main_metrics(run) if name.startswith(EVALUATION)), None)


def course(store: Store, run: TrackedRun, metric: str) -> Course | None:
    """A request; None where the run has no value of `metric`."""
    points = store.history(run, metric) if metric in run.last else []
    return Course(metric, points) if points else None


def checked_metrics(runs: Sequence[TrackedRun], metrics: Sequence[str]) -> list[str]:
    """`metrics`, each of which at least one of `runs` has.

    Raises:
        ConfigError: none has it.
    """
    known = sorted({name for run in runs for name in run.last})
    problems = [
        Problem("no run has this metric", "--metric", given=metric, nearest=nearest(metric, known))
        for metric in metrics
        if metric not in known
    ]
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(metrics))


def arrow(of: Course) -> str:
    """``0.33 -> 0.94``, or the one value that there is."""
    first, last = figures(of.first.value), figures(of.last.value)
    return last if len(of.points) == 1 else f"{first} -> {last}"


def sparkline(of: Course, width: int, encoding: str = "utf-8") -> str:
    """The course in at most `width` characters, its lowest value to its highest; NaN is a gap."""
    from grpox.toolkit import Curve, binned

    values = [point.value if _is_drawn(point.value) else math.nan for point in of.points]
    drawn = binned(Curve([float(point.step) for point in of.points], values), width).values
    blocks = BLOCKS if encoding.lower().startswith("utf") else PLAIN_BLOCKS
    numbers = [value for value in drawn if not math.isnan(value)]
    if not numbers:
        return ""
    low, span = min(numbers), max(numbers) - min(numbers)
    # One that does not move, but for rounding, is a line in the middle.
    moves = span > 1e-9 * max(map(abs, numbers))
    heights = {value: (value - low) / span if moves else 0.5 for value in numbers}
    return "".join(
        " " if math.isnan(value) else blocks[min(int(heights[value] * len(blocks)), len(blocks) - 1)]
        for value in drawn
    )


def _is_drawn(value: float) -> bool:
    # MLflow keeps an infinity as the largest number that there is, beside which nothing else would be seen.
    return abs(value) < 1e300


def by_metric(courses: Sequence[Course | None]) -> Mapping[str, Course]:
    """Those that there are."""
    return {told.metric: told for told in courses if told is not None}
