"""A run as MLflow tells it, in plain values: no part of it is MLflow's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import time

STATUSES = ("RUNNING", "FINISHED", "FAILED", "KILLED")
STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
KEY_TAG = "grpox.run"
"""What every run of grpox has, whoever started it."""
FOLDER_TAG = "grpox.output_dir"
CHANGED_TAG = "changed."
"""Begins the tag of a parameter that the run was resumed with and had not started with."""
EVALUATION, SYSTEM = "evaluation/", "system/"
"""How the names of metrics begin whose steps are not those of the optimizer alone."""
SHORT = 8
"""Characters of a run's id that are shown."""


@dataclass(frozen=True)
class Point:
    """A value of a metric."""

    step: int
    value: float
    time: int
    """Unix milliseconds."""


@dataclass(frozen=True)
class TrackedRun:
    """A run with its newest values; those before them are asked for by themselves."""

    run_id: str
    experiment_id: str
    experiment: str
    name: str
    status: str
    started: int
    """Unix milliseconds, as all times here."""
    ended: int | None
    """None while the run goes on, or was killed without a word."""
    params: Mapping[str, str]
    tags: Mapping[str, str]
    last: Mapping[str, Point]
    """Metric -> the value of its newest step."""
    artifact_uri: str

    @property
    def short_id(self) -> str:
        return self.run_id[:SHORT]

    @property
    def label(self) -> str:
        """What tells it from others at a glance."""
        return f"{self.name} {self.short_id}"

    @property
    def seconds(self) -> float:
        """From its start to its end, or to now."""
        until = time() if self.ended is None else self.ended / 1000
        return max(0.0, until - self.started / 1000)

    @property
    def steps(self) -> int:
        """Optimizer steps that have their metrics there."""
        return max(
            (point.step for name, point in self.last.items() if not name.startswith((EVALUATION, SYSTEM))),
            default=0,
        )

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to take, by what it was last resumed with; None where it does not say."""
        said = self.tags.get(f"{CHANGED_TAG}run.total_steps", "")
        # "100 -> 200 after step 100"
        told = said.partition(" -> ")[2].partition(" ")[0] or self.params.get("run.total_steps", "")
        return int(told) if told.isdecimal() else None

    def as_json(self) -> dict[str, object]:
        """What identifies it and how far it came, times in UTC."""
        return {
            "run_id": self.run_id,
            "name": self.name,
            "experiment": self.experiment,
            "status": self.status,
            "started": iso(self.started),
            "ended": iso(self.ended),
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "total_steps": self.total_steps,
            "output_dir": None if self.folder is None else str(self.folder),
        }

    @property
    def folder(self) -> Path | None:
        """The output folder, wherever that was."""
        told = self.tags.get(FOLDER_TAG)
        return None if told is None else Path(told)


def moment(milliseconds: int) -> str:
    """Local time as people write it: ``2026-11-22 06:17``."""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M")


def iso(milliseconds: int | None) -> str | None:
    """UTC, for programs."""
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()


def figures(value: float) -> str:
    """A value to four figures, as they line up in a table."""
    return f"{value:.4g}"


def strict(value: float) -> float | str:
    """A number for JSON, which has none for NaN: then ``"nan"``, as in metrics.jsonl."""
    return value if math.isfinite(value) else str(value)


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
