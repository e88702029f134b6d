"""Runs as their folders record them. Reading them asks no store and imports no MLflow.

A folder is a run's if it has the record of a run (``config.yaml`` and ``versions.json``) or of a sweep
(``mlflow.json``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from time import time

import yaml

from grpox.errors import ConfigError, nearest, redacted
from grpox.toolkit import MetricsLine, is_locked, read_mapping, read_small, some
from grpox_mlflow.lines import METRICS, SYSTEM, whole_lines
from grpox_mlflow.link import RunLink, ending, tags_of
from grpox_mlflow.naming import CHANGED, FOLDER_TAG, KEY_TAG, flattened

CONFIG, VERSIONS = "config.yaml", "versions.json"
EVALUATION = "evaluation/"
OF_RUN = "run."
"""Prefix of parameters that are not keys of a run file: ranks and steps."""
DEPTH = 3
"""Levels of folders that are searched for runs: ``runs/sweep/seed=1`` is on the third."""

Course = dict[int, float]
"""Values of a metric by step, at least one."""


class RunFolder:
    """A run in a folder, with times in Unix milliseconds. Parameters and values are read when first asked for.

    Args:
        is_whole: False: of the metrics only evaluations and the last step are read, which is fast.
    """

    def __init__(self, folder: Path, is_whole: bool = True) -> None:
        self.folder, self._is_whole = folder.absolute(), is_whole
        self.link = link = RunLink.read(folder)
        """The record for MLflow; None if MLflow does not track the run."""
        self.status, ended = ending(folder)
        if self.status == "KILLED" and not (folder / "failure.json").exists() and is_locked(folder):
            self.status = "RUNNING"
        if link is not None:
            self.started, tags = link.start_time, {**link.tags, KEY_TAG: link.key}
        else:
            record = read_mapping(folder / VERSIONS)
            started, versions = record.get("started"), record.get("versions")
            if not (isinstance(started, int | float) and 0 <= started < 1e11):
                started = (folder / VERSIONS).stat().st_mtime
            known = {
                "mlflow.source.name": record.get("source"),
                "grpox.git.commit": record.get("git_commit"),
                "grpox.version": versions.get("grpox") if isinstance(versions, Mapping) else None,
            }
            self.started = int(started * 1000)
            tags = {tag: str(value) for tag, value in known.items() if value is not None}
        self.name = (link and link.run_name) or self.folder.name
        self.run_id = (link and link.run_id) or ""
        """MLflow's id; empty if MLflow does not have the run."""
        self.experiment = link.experiment if link else ""
        self.ended = None if self.status == "RUNNING" else max(ended, self.started)
        self.seconds = max(0.0, (time() if self.ended is None else self.ended / 1000) - self.started / 1000)
        # The folder is where it is now.
        self.tags = {**redacted(tags | tags_of(folder)), FOLDER_TAG: str(self.folder)}

    @cached_property
    def params(self) -> Mapping[str, str]:
        """The parameters; of a run that MLflow does not track with the steps that the run file names."""
        if self.link is not None and self.link.params:
            return self.link.params
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
    def courses(self) -> Mapping[str, Course]:
        """Metric, also those of machines -> its values by step; of a repeated step the last value."""
        machines = sorted((self.folder / SYSTEM).glob("*.jsonl")) if self._is_whole else []
        files = [self.folder / METRICS, *machines]
        lines = [line for file in files for line in _read_lines(file, self._is_whole)]
        courses: dict[str, Course] = {}
        for line in sorted(lines, key=lambda line: line.step):
            for name, value in line.named_values.items():
                courses.setdefault(name, {})[line.step] = value
        return courses

    @cached_property
    def steps(self) -> int:
        """Number of optimizer steps whose metrics are recorded."""
        of_steps = (name for name in self.courses if not name.startswith((EVALUATION, f"{SYSTEM}/")))
        return max((next(reversed(self.courses[name])) for name in of_steps), default=0)

    @cached_property
    def total_steps(self) -> int | None:
        """Planned number of optimizer steps, since the last resume; None if the run does not record it."""
        # "100 -> 200 after step 100"
        changed = self.tags.get(f"{CHANGED}run.total_steps", "").partition(" -> ")[2].partition(" ")[0]
        total = changed or self.params.get(f"{OF_RUN}total_steps", "")
        return int(total) if total.isdecimal() else None

    def main_metrics(self) -> list[str]:
        """Names of the run's main metrics: reward, KL, length, gradient norm, and those of evaluations."""
        kl = "kl" if "kl" in self.courses else "sampling/kl"
        rewards = (name for name in self.courses if name.startswith(f"{EVALUATION}rewards/"))
        evaluated = ("accuracy", *sorted(r.removeprefix(EVALUATION) for r in rewards if r.endswith("/mean")))
        length = "completions/mean_length"
        of_steps = ("reward", kl, length, "grad_norm")
        names = (*of_steps, *(EVALUATION + name for name in (*evaluated, length)))
        return [name for name in names if name in self.courses]

    def as_json(self) -> dict[str, object]:
        """Return identity, status and progress, with times in UTC."""
        ended = None if self.ended is None else datetime.fromtimestamp(self.ended / 1000, UTC).isoformat()
        return {
            "run_id": self.run_id,
            "name": self.name,
            "experiment": self.experiment,
            "status": self.status,
            "started": datetime.fromtimestamp(self.started / 1000, UTC).isoformat(),
            "ended": ended,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "total_steps": self.total_steps,
            "output_dir": str(self.folder),
        }


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
        shown = some(f"{shown_path(run.folder)} ({run.status}, {moment(run.started)})" for run in named)
        raise ConfigError(f"means {len(named)} runs", "RUN", given=name, allowed=f"one of {shown}")
    near = nearest(name, sorted({word for run in known for word in (run.name, shown_path(run.folder))}))
    allowed = "folder or name of a run: grpox runs list"
    raise ConfigError("no such run here", "RUN", given=name, allowed=allowed, nearest=near)


def run_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders of runs: `root` and those below it. Those in a run are not searched."""
    if _is_run(root):
        yield root
    if depth == 0 or _has_record(root):
        return
    with suppress(OSError):  # a folder that may not be read has no runs to show
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        for name in names:
            if not name.startswith("."):
                yield from run_folders(root / name, depth - 1)


def _is_run(folder: Path) -> bool:
    return _has_record(folder) or RunLink.read(folder) is not None


def _has_record(folder: Path) -> bool:
    """Tell a run from a sweep, and from any folder with a file ``config.yaml``."""
    return all((folder / name).is_file() for name in (CONFIG, VERSIONS))


def _read_lines(path: Path, is_whole: bool) -> Iterator[MetricsLine]:
    """Yield the lines of a file of metrics; unless `is_whole`, evaluations and the last step alone."""
    steps = deque[bytes](maxlen=100)  # the last ones may be damaged
    for line, _ in whole_lines(path):
        if is_whole or b'"evaluation"' in line[:80]:
            with suppress(ValueError):
                yield MetricsLine.parse(line)
        else:
            steps.appendleft(line)  # parsing takes most of the time
    for line in steps:
        with suppress(ValueError):
            yield MetricsLine.parse(line)
            return


def moment(milliseconds: int) -> str:
    """Format as local time: ``2026-11-22 06:17``."""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M")


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory, if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
