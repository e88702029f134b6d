"""Runs as their folders record them. Reading them asks no store and imports no MLflow.

A folder is a run's if it has the record of a run (``config.yaml`` and ``versions.json``) or of a sweep
(``mlflow.json``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from time import time
from typing import NamedTuple

from grpox.errors import ConfigError, nearest, redacted
from grpox.toolkit import MetricsLine, is_locked, open_regular, read_mapping, read_small
from grpox_mlflow.followed import FollowedRun, ending, tags_of
from grpox_mlflow.naming import CHANGED, FOLDER_TAG, KEY_TAG, flattened
from grpox_mlflow.recorded import METRICS
from grpox_mlflow.recorded import SYSTEM as SYSTEM_FOLDER

CONFIG, VERSIONS = "config.yaml", "versions.json"
EVALUATION, SYSTEM = "evaluation/", "system/"
"""Prefixes of metrics whose steps are not only those of the optimizer."""
OF_RUN = "run."
"""Prefix of parameters that are not keys of a run file: ranks and steps."""
DEPTH = 3
"""Levels of folders that are searched for runs: ``runs/sweep/seed=1`` is on the third."""
_PASSED_OVER = {"node_modules", "__pycache__", "site-packages"}
_EVALUATION_WITHIN = 80
"""Bytes at the beginning of a line of metrics that tell whether it is an evaluation's."""
_TAIL = 1 << 16
"""Bytes at the end of a file of metrics that are searched for the last step first."""
_MOST_NAMED = 8
"""Largest number of runs that a message lists."""


class Point(NamedTuple):
    """A value of a metric."""

    step: int
    value: float
    time: int
    """Time in Unix milliseconds."""

    def __str__(self) -> str:
        return f"{self.value:.4g} at {self.step}"


class Course(NamedTuple):
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


class RunFolder:
    """A run in a folder. Parameters and values are read when they are first asked for.

    Args:
        is_whole: False: of the metrics only evaluations and the last step are read, which is fast.
    """

    def __init__(self, folder: Path, is_whole: bool = True) -> None:
        self.folder, self._is_whole = folder.absolute(), is_whole
        self.followed = followed = FollowedRun.read(folder)
        """The record for MLflow; None if MLflow does not track the run."""
        self.status, ended = ending(folder)
        if self.status == "KILLED" and not (folder / "failure.json").exists() and is_locked(folder):
            self.status = "RUNNING"
        self.name = (followed.run_name if followed else None) or self.folder.name
        self.run_id = (followed.run_id if followed else None) or ""
        """MLflow's id; empty if MLflow does not have the run."""
        self.experiment = followed.experiment if followed else ""
        self.started = followed.start_time if followed else _first_moment(folder)
        """Start in Unix milliseconds, as all times here."""
        self.ended = None if self.status == "RUNNING" else max(ended, self.started)
        tags = {**followed.tags, KEY_TAG: followed.key} if followed else _origin(folder)
        # The folder is where it is now.
        self.tags = {**redacted(tags | tags_of(folder)), FOLDER_TAG: str(self.folder)}

    @cached_property
    def params(self) -> Mapping[str, str]:
        """The parameters; of a run that MLflow does not track with the steps that the run file names."""
        if self.followed is not None and self.followed.params:
            return self.followed.params
        import yaml

        try:
            text = read_small(self.folder / CONFIG)
            config = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        params = dict(flattened(redacted(config))) if isinstance(config, dict) else {}
        if (steps := params.get("train.max_steps", "")).isdecimal():
            params[f"{OF_RUN}total_steps"] = steps
        return params

    @cached_property
    def _lines(self) -> list[MetricsLine]:
        """The metrics, also those of machines, by step; of a repeated step the last line comes last."""
        machines = sorted((self.folder / SYSTEM_FOLDER).glob("*.jsonl")) if self._is_whole else []
        files = [self.folder / METRICS, *machines]
        lines = [line for file in files for line in _read_lines(file, only_evaluations=not self._is_whole)]
        return sorted(lines, key=lambda line: line.step)

    @cached_property
    def last(self) -> Mapping[str, Point]:
        """Metric -> the value of its newest step."""
        newest: dict[str, MetricsLine] = {}
        step = None if self._is_whole else _newest_step(self.folder / METRICS)
        for line in [*self._lines, *([] if step is None else [step])]:
            newest.update(dict.fromkeys(line.named_values, line))
        return {name: _point(line, name) for name, line in newest.items()}

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end, or to now."""
        until = time() if self.ended is None else self.ended / 1000
        return max(0.0, until - self.started / 1000)

    @property
    def steps(self) -> int:
        """Number of optimizer steps whose metrics are recorded."""
        of_steps = [name for name in self.last if not name.startswith((EVALUATION, SYSTEM))]
        return max((self.last[name].step for name in of_steps), default=0)

    @property
    def total_steps(self) -> int | None:
        """Planned number of optimizer steps, since the last resume; None if the run does not record it."""
        # "100 -> 200 after step 100"
        changed = self.tags.get(f"{CHANGED}run.total_steps", "").partition(" -> ")[2].partition(" ")[0]
        total = changed or self.params.get(f"{OF_RUN}total_steps", "")
        return int(total) if total.isdecimal() else None

    def course(self, metric: str) -> Course | None:
        """Return a metric's values by step, the last value of a repeated step; None if the run has none."""
        points = {line.step: _point(line, metric) for line in self._lines if metric in line.named_values}
        return Course(metric, list(points.values())) if points else None

    def artifacts(self) -> dict[str, int | None]:
        """Return name -> number of files in a folder, or None for a file; without hidden files and locks."""
        entries = sorted(entry for entry in self.folder.iterdir() if entry.suffix not in (".lock", ".pid"))
        return {
            entry.name: sum(1 for _ in entry.iterdir()) if entry.is_dir() else None
            for entry in entries
            if not entry.name.startswith(".")
        }

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
            "output_dir": str(self.folder),
        }


def newest_runs(root: Path, most: int, status: str | None) -> list[RunFolder]:
    """Return at most `most` runs below `root`, the newest first, with one status if it is given.

    Raises:
        ConfigError: there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError("no such folder", "FOLDER", given=str(root))
    runs = (RunFolder(folder, is_whole=False) for folder in run_folders(root))
    wanted = [run for run in runs if status in (None, run.status)]
    return sorted(wanted, key=lambda run: run.started, reverse=True)[:most]


def find_run(name: str) -> RunFolder:
    """Return the run in the folder `name`, or the run of this name below the working directory.

    Raises:
        ConfigError: there is no such run, or there are several.
    """
    if _is_run(Path(name)):
        return RunFolder(Path(name))
    known = [RunFolder(folder) for folder in run_folders(Path())]
    named = [run for run in known if name in (run.name, run.folder.name)]
    if len(named) == 1:
        return named[0]
    if named:
        shown = named[:_MOST_NAMED]
        each = ", ".join(f"{shown_path(run.folder)} ({run.status}, {moment(run.started)})" for run in shown)
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        raise ConfigError(f"means {len(named)} runs", "RUN", given=name, allowed=f"one of {each}{more}")
    near = nearest(name, sorted({word for run in known for word in (run.name, shown_path(run.folder))}))
    allowed = "folder or name of a run: grpox runs list"
    raise ConfigError("no such run here", "RUN", given=name, allowed=allowed, nearest=near)


def run_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders of runs: `root` and those below it. Those in a run are not searched."""
    if _is_run(root):
        yield root
    if depth == 0 or _has_record(root):
        return
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # a folder that may not be read has no runs to show
        return
    for name in sorted(names):
        if not name.startswith(".") and name not in _PASSED_OVER:
            yield from run_folders(root / name, depth - 1)


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


def _is_run(folder: Path) -> bool:
    return _has_record(folder) or FollowedRun.read(folder) is not None


def _has_record(folder: Path) -> bool:
    """Tell a run from a sweep, and from any folder with a file ``config.yaml``."""
    return all((folder / name).is_file() for name in (CONFIG, VERSIONS))


def _origin(folder: Path) -> dict[str, str]:
    """Return run file, commit and version of a run that MLflow does not track, as tags."""
    record = read_mapping(folder / VERSIONS)
    versions = record.get("versions")
    known = {
        "mlflow.source.name": record.get("source"),
        "grpox.git.commit": record.get("git_commit"),
        "grpox.version": versions.get("grpox") if isinstance(versions, Mapping) else None,
    }
    return {tag: str(value) for tag, value in known.items() if value is not None}


def _first_moment(folder: Path) -> int:
    """Return the start of a run without MLflow in Unix milliseconds.

    If the record does not name it, it is the first moment of the metrics, the only ones to survive a resume.
    """
    started = read_mapping(folder / VERSIONS).get("started")
    if isinstance(started, int | float) and 0 <= started < 1e11:
        return int(started * 1000)
    began = (folder / VERSIONS).stat().st_mtime
    first = next(_read_lines(folder / METRICS), None)
    return int((began if first is None else min(began, first.time)) * 1000)


def _point(line: MetricsLine, metric: str) -> Point:
    return Point(line.step, line.named_values[metric], int(line.time * 1000))


def _newest_step(path: Path) -> MetricsLine | None:
    """Return the last line of an optimizer step in a file of metrics, read from its end."""
    size = path.stat().st_size if path.is_file() else 0
    length = _TAIL
    while size:
        with open_regular(path) as file:
            file.seek(max(0, size - length))
            # The first line of a part may be half of one.
            tail = file.readlines()[0 if length >= size else 1 :]
        steps = (line for line in map(_parsed, reversed(tail)) if line is not None and not line.is_evaluation)
        if (newest := next(steps, None)) is not None or length >= size:
            return newest
        length *= 16
    return None


def _read_lines(path: Path, only_evaluations: bool = False) -> Iterator[MetricsLine]:
    """Yield the lines of a file of metrics that are whole; a missing file has none."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        for line in file:
            if only_evaluations and b'"evaluation"' not in line[:_EVALUATION_WITHIN]:
                continue  # parsing takes most of the time
            if (parsed := _parsed(line)) is not None:
                yield parsed


def _parsed(line: bytes) -> MetricsLine | None:
    """Read a line; None where a process that was killed has left half of one."""
    try:
        return MetricsLine.parse(line)
    except ValueError:
        return None
