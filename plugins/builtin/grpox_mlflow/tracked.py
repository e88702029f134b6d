"""A run of MLflow in plain values, without MLflow's objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any, Protocol

from grpox.toolkit import Curve, binned, parameter_defaults
from grpox_mlflow.naming import CHANGED, FOLDER_TAG, flattened

EVALUATION, SYSTEM = "evaluation/", "system/"
"""Prefixes of metrics whose steps are not only those of the optimizer."""
OF_RUN = "run."
"""Prefix of parameters that are not keys of a run file: ranks and steps."""
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""Eight heights, and their replacements if the terminal's encoding has no blocks."""


@dataclass(frozen=True)
class Point:
    """A value of a metric."""

    step: int
    value: float
    time: int
    """Time in Unix milliseconds."""

    def __str__(self) -> str:
        return f"{self.value:.4g} at {self.step}"


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
        """The highest value, the first of several; NaN only if there is no other value."""
        return max(self._numbers, key=lambda point: point.value)

    @property
    def lowest(self) -> Point:
        return min(self._numbers, key=lambda point: point.value)

    @property
    def _numbers(self) -> Sequence[Point]:
        return [point for point in self.points if not math.isnan(point.value)] or self.points

    def as_json(self) -> dict[str, object]:
        """Return first, last, lowest and highest, each as ``{"step": ..., "value": ...}``."""
        points = {"first": self.first, "last": self.last, "lowest": self.lowest, "highest": self.highest}
        return {name: {"step": point.step, "value": strict(point.value)} for name, point in points.items()}


@dataclass(frozen=True)
class TrackedRun:
    """A run with its newest values."""

    run_id: str
    experiment_id: str
    experiment: str
    name: str
    status: str
    started: int
    """Start in Unix milliseconds, as all times here."""
    ended: int | None
    """End; None while the run continues, or if it was killed without a record of its end."""
    params: Mapping[str, str]
    tags: Mapping[str, str]
    last: Mapping[str, Point]
    """Metric -> the value of its newest step."""
    artifact_uri: str

    @property
    def short_id(self) -> str:
        return self.run_id[:8]

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end, or to now."""
        until = time() if self.ended is None else self.ended / 1000
        return max(0.0, until - self.started / 1000)

    @property
    def steps(self) -> int:
        """Number of optimizer steps whose metrics MLflow has."""
        of_steps = [name for name in self.last if not name.startswith((EVALUATION, SYSTEM))]
        return max((self.last[name].step for name in of_steps), default=0)

    @property
    def total_steps(self) -> int | None:
        """Planned number of optimizer steps, since the last resume; None if the run does not record it."""
        # "100 -> 200 after step 100"
        changed = self.tags.get(f"{CHANGED}run.total_steps", "").partition(" -> ")[2].partition(" ")[0]
        total = changed or self.params.get("run.total_steps", "")
        return int(total) if total.isdecimal() else None

    @property
    def folder(self) -> Path | None:
        """Output folder on the machine of the run."""
        return Path(self.tags[FOLDER_TAG]) if FOLDER_TAG in self.tags else None

    def as_json(self) -> dict[str, object]:
        """Return identity, status and progress, with times in UTC."""
        return {
            "run_id": self.run_id,
            "name": self.name,
            "experiment": self.experiment,
            "status": self.status,
            "started": _iso(self.started),
            "ended": None if self.ended is None else _iso(self.ended),
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "total_steps": self.total_steps,
            "output_dir": None if self.folder is None else str(self.folder),
        }


class Runs(Protocol):
    """Runs to read: those of folders, or those of MLflow's store."""

    @property
    def place(self) -> str:
        """The folder or store that has them, for messages."""

    @property
    def has_ids(self) -> bool:
        """True if a list of them shows ids."""

    def newest(self, most: int, experiment: str | None, status: str | None) -> list[TrackedRun]:
        """Return at most `most` runs, the newest first; of one experiment and with one status, if given."""

    def course(self, run: TrackedRun, metric: str) -> Course | None:
        """Return a metric's values by step; None if the run has none."""

    def artifacts(self, run: TrackedRun) -> dict[str, int | None]:
        """Return name -> number of files in a folder, or None for a file."""

    def address_of(self, run: TrackedRun) -> str:
        """Return the address of the MLflow store that has the run; empty if none has."""


def main_metrics(run: TrackedRun) -> list[str]:
    """Names of the run's main metrics: reward, KL, length, gradient norm, and those of evaluations."""
    kl = "kl" if "kl" in run.last else "sampling/kl"
    of_steps = ("reward", kl, "completions/mean_length", "grad_norm")
    rewards = sorted(n for n in run.last if n.startswith(f"{EVALUATION}rewards/") and n.endswith("/mean"))
    evaluated = (f"{EVALUATION}accuracy", *rewards, f"{EVALUATION}completions/mean_length")
    return [name for name in (*of_steps, *evaluated) if name in run.last]


def figures(point: Point) -> str:
    """Format a value to four figures."""
    return f"{point.value:.4g}"


def strict(value: float) -> float | str:
    """Return a number for JSON; NaN and infinities, which JSON lacks, as text like in metrics.jsonl."""
    return value if math.isfinite(value) else str(value)


def moment(milliseconds: int) -> str:
    """Format as local time: ``2026-11-22 06:17``."""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M")


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory, if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()


def sparkline(course: Course, width: int, encoding: str = "utf-8") -> str:
    """Draw the values in at most `width` characters, scaled from lowest to highest; NaN is a gap."""
    # MLflow stores infinity as the largest number, which would flatten all other values.
    values = [point.value if abs(point.value) < 1e300 else math.nan for point in course.points]
    drawn = binned(Curve([float(point.step) for point in course.points], values), width).values
    blocks = BLOCKS if encoding.lower().startswith("utf") else PLAIN_BLOCKS
    numbers = [value for value in drawn if not math.isnan(value)]
    if not numbers:
        return ""
    low, span = min(numbers), max(numbers) - min(numbers)
    # A constant, except for rounding, is a line in the middle.
    moves = span > 1e-9 * max(map(abs, numbers))
    heights = {value: (value - low) / span if moves else 0.5 for value in numbers}
    return "".join(
        " " if math.isnan(value) else blocks[min(int(heights[value] * len(blocks)), len(blocks) - 1)]
        for value in drawn
    )


def changed_params(params: Mapping[str, str], registry: Any = None) -> dict[str, str]:
    """Return the params, as text, that differ from an empty run file's, including keys without a default.

    Args:
        params: dotted key -> value, as the plugin for MLflow writes them.
        registry: default: the installed components. If it lacks a component, every parameter of that component
            counts as changed.
    """
    defaults: dict[str, str] = {}
    for prefix, values in parameter_defaults(params, registry).items():
        defaults |= dict(flattened(dict(values), prefix))
    return {
        key: value
        for key, value in params.items()
        if not key.startswith(OF_RUN) and not (key in defaults and same(value, defaults[key]))
    }


def same(one: str | None, other: str | None) -> bool:
    """Tell whether two values are equal; numbers compare by value, as a run file may have 1 for 1.0."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False
