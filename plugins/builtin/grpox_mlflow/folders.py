"""Runs as their folders record them. Reading them asks no store and imports no MLflow.

A folder is a run's if it has the record of a run (``config.yaml`` and ``versions.json``) or of a sweep
(``mlflow.json``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from grpox.errors import ConfigError, nearest, redacted
from grpox.toolkit import MetricsLine, is_locked, open_regular, read_mapping, read_small
from grpox_mlflow.followed import FollowedRun, ending, tags_of
from grpox_mlflow.naming import FOLDER_TAG, KEY_TAG, flattened
from grpox_mlflow.recorded import METRICS
from grpox_mlflow.recorded import SYSTEM as SYSTEM_FOLDER
from grpox_mlflow.tracked import EVALUATION, OF_RUN, Course, Point, TrackedRun, moment, shown_path

CONFIG, VERSIONS = "config.yaml", "versions.json"
DEPTH = 3
"""Levels of folders that are searched for runs: ``runs/sweep/seed=1`` is on the third."""
_PASSED_OVER = {"node_modules", "__pycache__", "site-packages"}
_EVALUATION_WITHIN = 80
"""Bytes at the beginning of a line of metrics that tell whether it is an evaluation's."""
_TAIL = 1 << 16
"""Bytes at the end of a file of metrics that are searched for the last step first."""
_MOST_NAMED = 8
"""Largest number of runs that a message lists."""


class RunFolders:
    """The runs in `root` and in the folders below it."""

    has_ids = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._metrics = cache(_metrics)

    @property
    def place(self) -> str:
        """The folder that is searched, and where else a run may be."""
        return f"{self._root.absolute()}, {DEPTH} levels deep; for runs in MLflow: --mlflow"

    def newest(self, most: int, experiment: str | None, status: str | None) -> list[TrackedRun]:
        """Read the newest runs; values are those of the last step and of evaluations.

        Raises:
            ConfigError: there is no such folder, or no run of this experiment.
        """
        if not self._root.is_dir():
            raise ConfigError("no such folder", "FOLDER", given=str(self._root))
        runs = [_read(folder) for folder in run_folders(self._root)]
        if experiment is not None and runs and experiment not in {run.experiment for run in runs}:
            known = sorted({run.experiment for run in runs if run.experiment})
            what, near = f"no run of this experiment in {self._root.absolute()}", nearest(experiment, known)
            raise ConfigError(what, "--experiment", given=experiment, allowed=", ".join(known), nearest=near)
        wanted = (run for run in runs if experiment in (None, run.experiment) and status in (None, run.status))
        newest_first = sorted(wanted, key=lambda run: run.started, reverse=True)
        return [self._with_values(run) for run in newest_first[:most]]

    def find(self, name: str) -> TrackedRun:
        """Return the run in the folder `name`, or the run below the root of this name or (partial) id.

        Raises:
            ConfigError: there is no such run, or there are several.
        """
        if _is_run(Path(name)):
            return self._whole(_read(Path(name)))
        known = [_read(folder) for folder in run_folders(self._root)]
        named = [run for run in known if name in (run.name, run.folder.name if run.folder else "")]
        named = named or [run for run in known if name and run.run_id.startswith(name)]
        if len(named) == 1:
            return self._whole(named[0])
        if named:
            each = ", ".join(
                f"{_shown(run)} ({run.status}, {moment(run.started)})" for run in named[:_MOST_NAMED]
            )
            more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            raise ConfigError(f"means {len(named)} runs", "RUN", given=name, allowed=f"one of {each}{more}")
        near = nearest(name, sorted({word for run in known for word in (run.name, run.short_id, _shown(run))}))
        allowed = "folder, name or id of a run: grpox runs list; for runs in MLflow: --mlflow"
        raise ConfigError("no such run here", "RUN", given=name, allowed=allowed, nearest=near)

    def course(self, run: TrackedRun, metric: str) -> Course | None:
        """Return a metric's values by step, the last value of a repeated step; None if the run has none."""
        assert run.folder is not None  # each is read from its folder
        return _course(self._metrics(run.folder, is_whole=not metric.startswith(EVALUATION)), metric)

    def artifacts(self, run: TrackedRun) -> dict[str, int | None]:
        """Return name -> number of files in a folder, or None for a file; without hidden files and locks."""
        assert run.folder is not None
        entries = sorted(entry for entry in run.folder.iterdir() if entry.suffix not in (".lock", ".pid"))
        return {
            entry.name: sum(1 for _ in entry.iterdir()) if entry.is_dir() else None
            for entry in entries
            if not entry.name.startswith(".")
        }

    def address_of(self, run: TrackedRun) -> str:
        """Return the address of the store, without a password; empty for a run that MLflow does not track."""
        followed = FollowedRun.read(run.folder) if run.folder else None
        return followed.tracking_uri if followed else ""

    def _with_values(self, run: TrackedRun) -> TrackedRun:
        """Add parameters, and the values of the last step and of the last evaluations."""
        assert run.folder is not None
        last = _last(self._metrics(run.folder, is_whole=False))
        if (newest := _newest_step(run.folder / METRICS)) is not None:
            last |= _last([newest])
        return replace(_with_params(run), last=last)

    def _whole(self, run: TrackedRun) -> TrackedRun:
        """Add parameters and the last value of every metric."""
        assert run.folder is not None
        return replace(_with_params(run), last=_last(self._metrics(run.folder, is_whole=True)))


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


def _is_run(folder: Path) -> bool:
    return _has_record(folder) or FollowedRun.read(folder) is not None


def _has_record(folder: Path) -> bool:
    """Tell a run from a sweep, and from any folder with a file ``config.yaml``."""
    return all((folder / name).is_file() for name in (CONFIG, VERSIONS))


def _read(folder: Path) -> TrackedRun:
    """Read identity and status of a run, without parameters and values."""
    followed = FollowedRun.read(folder)
    status, ended = ending(folder)
    if status == "KILLED" and not (folder / "failure.json").exists() and is_locked(folder):
        status = "RUNNING"
    started = followed.start_time if followed else _first_moment(folder)
    tags = {**(followed.tags if followed else _origin(folder)), **tags_of(folder)}
    if followed is not None:
        tags[KEY_TAG] = followed.key
    return TrackedRun(
        run_id=(followed.run_id if followed else None) or "",
        experiment_id=(followed.experiment_id if followed else None) or "",
        experiment=followed.experiment if followed else "",
        name=(followed.run_name if followed else None) or folder.absolute().name,
        status=status,
        started=started,
        ended=None if status == "RUNNING" else max(ended, started),
        params=followed.params if followed else {},
        tags={**redacted(tags), FOLDER_TAG: str(folder.absolute())},  # where it is now
        last={},
        artifact_uri="",
    )


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
    first = next(_lines(folder / METRICS), None)
    return int((began if first is None else min(began, first.time)) * 1000)


def _with_params(run: TrackedRun) -> TrackedRun:
    """Add the parameters of a run that MLflow does not track; its steps as far as the run file names them."""
    assert run.folder is not None
    if run.params:
        return run
    import yaml

    try:
        text = read_small(run.folder / CONFIG)
        config = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
    except (OSError, ValueError, yaml.YAMLError):
        return run
    params = dict(flattened(redacted(config))) if isinstance(config, dict) else {}
    if (steps := params.get("train.max_steps", "")).isdecimal():
        params[f"{OF_RUN}total_steps"] = steps
    return replace(run, params=params)


def _metrics(folder: Path, is_whole: bool) -> list[MetricsLine]:
    """Read the metrics of a run, also those of its machines, by step; not whole: only those of evaluations.

    Of a repeated step the last line comes last.
    """
    files = [folder / METRICS, *(sorted((folder / SYSTEM_FOLDER).glob("*.jsonl")) if is_whole else ())]
    lines = [line for file in files for line in _lines(file, only_evaluations=not is_whole)]
    return sorted(lines, key=lambda line: line.step)


def _course(lines: Sequence[MetricsLine], metric: str) -> Course | None:
    """Return a metric's values in lines by step, the last value of a repeated step; None if no line has it."""
    points = {line.step: _point(line, metric) for line in lines if metric in line.named_values}
    return Course(metric, list(points.values())) if points else None


def _last(lines: Sequence[MetricsLine]) -> dict[str, Point]:
    """Return the last value of each metric in lines by step."""
    newest: dict[str, MetricsLine] = {}
    for line in lines:
        newest.update(dict.fromkeys(line.named_values, line))
    return {name: _point(line, name) for name, line in newest.items()}


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


def _lines(path: Path, only_evaluations: bool = False) -> Iterator[MetricsLine]:
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


def _shown(run: TrackedRun) -> str:
    assert run.folder is not None
    return shown_path(run.folder)
