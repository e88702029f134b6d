"""The local record of a run: config, versions, metrics and completions as plain files in its folder.

The record needs no server and is always on, so nothing is lost when a tracker fails.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from grpox.config import RunConfig
from grpox.config.inputs import AUTO, Dtype
from grpox.errors import ConfigError, RunFailed, text_of
from grpox.errors.formatting import format_bytes, pluralize
from grpox.errors.redaction import redact, redacted
from grpox.observing.record_files import MetricsFile, MetricsLine, write_completions
from grpox.observing.token_files import step_of
from grpox.plugins.hookspecs import hookimpl
from grpox.runfile.lock.differences import AUTOMATIC, CHAT_DATE, DTYPE, changes
from grpox.runfile.secrets import VERSIONS
from grpox.runfile.yaml_lines import Dumper, leaves, read_yaml
from grpox.runtime.files import (
    open_regular,
    read_mapping,
    read_small,
    sync,
    write_atomically,
    write_error_message,
)
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from grpox.contracts import RunContext, ScoredRollout

logger = get_logger(__name__)
LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "datasets", "pluggy", "pydantic", "mlflow")

RECORD = (
    "metrics.jsonl",
    "failure.json",
    "summary.json",
    "versions.json",
    "plugins.lock.json",
    "config.yaml",
    "completions",
    "tokens",
    "report.html",
    "system",
    "stalls",
    "alarms.json",
    "checkpoints",
    "faults",
)
"""Files that a run leaves in its folder, first those written at its end.

The model is not among them, nor are the files of its observers, which ``versions.json`` names.
"""
BY_STEP = ("completions", "tokens")
"""Folders of parquet files that are named by a step."""
OBSERVERS, STARTED = "observer_files", "started"
"""Keys of ``versions.json``."""


def versions(plugin_distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, `LIBRARIES` and the plugins' distributions, as far as they are installed.

    A run with ``tracking: {}`` works without mlflow.
    """
    installed = {"python": platform.python_version()}
    for name in dict.fromkeys([*LIBRARIES, *plugin_distributions]):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> str | None:
    """Return the commit of the working directory, ``-dirty`` when files differ; None outside git."""
    ask = partial(subprocess.check_output, stderr=subprocess.DEVNULL, text=True, timeout=10)
    try:
        commit = ask(["git", "rev-parse", "HEAD"]).strip()
        return f"{commit}-dirty" if ask(["git", "status", "--porcelain", "--untracked-files=no"]) else commit
    except (OSError, subprocess.SubprocessError):
        return None


class LocalRecord:
    """Writes ``config.yaml``, ``versions.json``, ``metrics.jsonl`` and ``completions/*.parquet``.

    A failed run also has ``failure.json``: ``{"error": "RunFailed: ..."}``.

    Each line of ``metrics.jsonl`` is one JSON object, on disk before the next step starts:
    ``{"step": 3, "time": <unix seconds>, "metrics": {...}}`` for an optimizer step, and
    ``{"step": 3, "time": ..., "evaluation": {...}}`` for an evaluation. Numbers that JSON lacks
    are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which Python's `float` reads. The record of an earlier
    run in the same folder, including its model, is moved to ``earlier/``.

    On a full disk, lines of metrics wait in memory until there is space, and completions are dropped. Both
    raise RunFailed, which `Observers` reports once and counts.

    Args:
        files: names of the files that observers leave in the run's folder.
    """

    def __init__(self, files: Iterable[str] = ()) -> None:
        self._files_of_observers = sorted(set(files))
        self._metrics: MetricsFile | None = None

    @hookimpl(tryfirst=True)
    def grpox_run_started(self, run: RunContext) -> None:
        folder = run.output_dir
        self._run = run
        self._batches = run.generations_before
        self._batches_of: Counter[int] = Counter()  # step -> its saved batches
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        versions: dict[str, object] = {"versions": dict(run.versions), "git_commit": run.git_commit}
        versions |= {"total_steps": run.total_steps, "world_size": run.world_size}
        versions |= _source(run)
        if (started := _started(run)) is not None:
            versions[STARTED] = started
        if self._files_of_observers:
            versions[OBSERVERS] = self._files_of_observers
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if run.resumed_at is None:
                _set_aside(folder, self._files_of_observers)
            else:
                _go_back(run, run.resumed_at)
            write_atomically(folder / "config.yaml", config_text(run.config))
            write_atomically(folder / VERSIONS, json.dumps(versions, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RunFailed(write_error_message(error, Path(error.filename or folder))) from error

    @hookimpl(tryfirst=True)
    def grpox_rollouts_scored(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        every = self._run.config.logging.save_completions_every
        self._batches += 1
        if every == 0 or (self._batches - 1) % every:
            return
        self._batches_of[step] += 1
        # If one step uses several generation batches, each batch has its own file.
        part = f"_{self._batches_of[step]}" if self._batches_of[step] > 1 else ""
        path = self._run.output_dir / "completions" / f"step_{step:06d}{part}.parquet"
        with _written(path, "completions are not saved: "):
            write_completions(path, step, rollouts)

    @hookimpl(tryfirst=True)
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(step, "metrics", metrics)

    @hookimpl(tryfirst=True)
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append(step, "evaluation", metrics)

    @hookimpl(tryfirst=True)
    def grpox_run_failed(self, run: RunContext, error: BaseException) -> None:
        # An interruption has no message.
        message = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
        path = run.output_dir / "failure.json"
        try:
            with _written(path):
                write_atomically(path, json.dumps({"error": redact(message)}, ensure_ascii=False) + "\n")
        finally:
            self.grpox_run_finished()

    @hookimpl(tryfirst=True)
    def grpox_run_finished(self) -> None:
        # The last attempt to write the metrics that wait.
        if self._metrics is not None:
            with _written(self._metrics.path, f"{pluralize(len(self._metrics.waiting), 'line')} not written: "):
                self._metrics.catch_up()

    def _append(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else str(float(value)) for name, value in metrics.items()}
        assert self._metrics is not None  # the run has started
        line = {"step": step, "time": time.time(), kind: values}
        self._metrics.waiting.append(json.dumps(line, allow_nan=False))
        with _written(self._metrics.path, after="\n    the missing lines wait in memory until there is space"):
            self._metrics.catch_up()


@contextmanager
def _written(path: Path, before: str = "", after: str = "") -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into RunFailed."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{before}{write_error_message(error, path)}{after}") from error


def config_text(config: RunConfig) -> str:
    """Format the resolved config as YAML, from which `RunConfig` reads the same config, except secrets."""
    dumped = redacted(config.model_dump(mode="json"))
    return yaml.dump(dumped, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _started(run: RunContext) -> float | None:
    """Return the Unix time at which the run's first command began, as a resumed run's record has it."""
    earlier = None if run.resumed_at is None else read_mapping(run.output_dir / VERSIONS).get(STARTED)
    return earlier if isinstance(earlier, int | float) else run.started


def began(config: RunConfig) -> bool:
    """Return True if the run's folder has this run's record; differences without effect are ignored."""
    recorded = _recorded(config)
    return recorded is not None and _has_same_evaluation(recorded, config)


def finished(config: RunConfig, steps: int) -> dict[str, Any] | None:
    """Return the summary of this run in its folder if the run has ended, else None.

    After a change of `evaluation`, a run that stopped early may continue.

    Args:
        steps: steps of the schedule; a run that stopped early has taken fewer.
    """
    summary = read_mapping(Path(config.output_dir) / "summary.json")
    recorded = _recorded(config)
    if not summary or recorded is None:
        return None
    stopped = "stopped_early" in summary and _has_same_evaluation(recorded, config)
    return summary if summary.get("steps") == steps or stopped else None


def _has_same_evaluation(recorded: RunConfig, config: RunConfig) -> bool:
    # Without what only a loaded config knows, such as whether its rewards are 0 or 1.
    return recorded.model_dump(include={"evaluation"}) == config.model_dump(include={"evaluation"})


def _recorded(config: RunConfig) -> RunConfig | None:
    """Read the config in the run's folder; None if it belongs to another run."""
    try:
        path = Path(config.output_dir) / "config.yaml"
        recorded = RunConfig.model_validate(read_yaml(read_small(path), str(path)).data)
    except (OSError, ValueError, ConfigError):
        return None
    return None if changes(recorded.model_dump(mode="json"), config) else recorded


def recorded_choices(output_dir: Path) -> dict[str, Any]:
    """Read what the keys of `AUTOMATIC` were in the run whose record is in the folder: dotted key -> value.

    Keys that cannot be read are left out. `STARTED` is the day on which the run began.
    """
    try:
        path = output_dir / "config.yaml"
        config = dict(leaves(read_yaml(read_small(path), str(path)).data))
    except (OSError, ValueError, ConfigError):
        return {}
    if config.get(DTYPE) not in get_args(Dtype):
        config.pop(DTYPE, None)
    chosen = {key: config[key] for key in AUTOMATIC if config.get(key, AUTO) != AUTO}
    with suppress(KeyError, ValueError):
        chosen[CHAT_DATE] = date.fromisoformat(str(chosen.pop(CHAT_DATE)))
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        chosen[STARTED] = date.fromtimestamp(read_mapping(output_dir / VERSIONS)[STARTED])
    return chosen


def sync_record(folder: Path, after: int) -> int:
    """Flush to disk the files that a resumed run needs, and return the size of ``metrics.jsonl`` in bytes.

    Args:
        after: completions and tokens up to this step are already on disk.
    """
    metrics = folder / "metrics.jsonl"
    new = (path for path in _step_files(folder) if step_of(path) > after)
    others = (folder / name for name in _files_of_observers(folder))
    for path in (*new, metrics, *others, *(folder / name for name in BY_STEP), folder):
        if path.exists():
            sync(path)
    return metrics.stat().st_size if metrics.exists() else 0


def _source(run: RunContext) -> dict[str, str]:
    """Return name and path of the run file; for a run resumed from its own record, the original run file's."""
    path = Path(run.source).absolute()
    if path == (run.output_dir / "config.yaml").absolute() and (
        recorded := read_mapping(run.output_dir / VERSIONS)
    ):
        return {key: str(recorded[key]) for key in ("source", "file") if key in recorded}
    return {"source": run.source, **({"file": str(path)} if path.is_file() else {})}


def files_of_observers(observers: Iterable[object]) -> list[str]:
    """List the files that observers leave in a run's folder: their attributes `files`."""
    return [name for observer in observers for name in getattr(observer, "files", ())]


def _files_of_observers(folder: Path) -> list[str]:
    """List the observers' files of the run in the folder; names outside of it are ignored."""
    names = read_mapping(folder / VERSIONS).get(OBSERVERS)
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [name for name in names if Path(name).name == name]


def _set_aside(folder: Path, files: Sequence[str]) -> None:
    """Move the files of an earlier run to ``earlier/<time of its end>``, so that none is overwritten.

    `files`, those of this run's observers, may also be the earlier run's.
    """
    names = dict.fromkeys((*RECORD, *files, *_files_of_observers(folder)))
    there = [name for name in names if (folder / name).exists()]
    if not there:
        return
    ended = time.localtime((folder / there[0]).stat().st_mtime)
    name = time.strftime("%Y-%m-%dT%H-%M-%S", ended)
    # Numbered if another folder has the same second.
    aside, number = folder / "earlier" / name, 1
    while aside.exists():
        number += 1
        aside = aside.with_name(f"{name}-{number}")
    aside.mkdir(parents=True)
    if "versions.json" in there:
        # Without a run's record beside it, a folder of this name is not known to be a run's model.
        there += [name for name in ("model", "adapter") if (folder / name).exists()]
    for name in there:
        (folder / name).replace(aside / name)
    earlier = folder / "earlier"
    if any(earlier.glob("*/checkpoints/*")):  # grpox never removes them
        size = sum(path.stat().st_size for path in earlier.rglob("*") if path.is_file())
        logger.info(
            "the earlier run in this folder was moved to %s, which holds %s; remove what you do not need",
            earlier,
            format_bytes(size),
        )


def _go_back(run: RunContext, step: int) -> None:
    """Restore the record to its state at the checkpoint after `step`.

    Later steps will be repeated; their lines of metrics move to ``metrics.undone.jsonl``.
    """
    folder, metrics = run.output_dir, run.output_dir / "metrics.jsonl"
    size, end = metrics.stat().st_size if metrics.exists() else 0, run.metrics_bytes
    if size < end:
        logger.warning(
            "%s has %s bytes, and had %s when the checkpoint was saved\n"
            "    the run continues after the existing lines; the lost metrics are not computed again",
            metrics,
            size,
            end,
        )
        end = metrics.read_bytes().rfind(b"\n") + 1 if size else 0
    if metrics.exists():
        with open_regular(metrics, "r+b") as file:
            file.seek(end)
            since = [line.rstrip(b"\n") + b"\n" for line in file]  # the last one may be torn
            late = [line for line in since if _is_of_before(line, step)]
            with open_regular(folder / "metrics.undone.jsonl", "ab") as undone:
                undone.writelines(line for line in since if line not in late)
            file.seek(end)
            file.writelines(late)
            file.truncate()
    for path in _step_files(folder):
        if step_of(path) > step:
            path.unlink()
    for name in ("failure.json", "summary.json"):
        (folder / name).unlink(missing_ok=True)


def _is_of_before(line: bytes, step: int) -> bool:
    """Return True if a line belongs before the checkpoint after `step`, but was written late on a full disk."""
    try:
        # An evaluation comes before the checkpoint of its step; the evaluation at step 0 is repeated.
        return 0 < MetricsLine.parse(line).step <= step
    except ValueError:
        return False


def _step_files(folder: Path) -> list[Path]:
    """List the files of completions and of tokens."""
    paths = (path for name in BY_STEP for path in (folder / name).glob("step_*.parquet"))
    return [path for path in paths if path.stem.split("_")[1].isdecimal()]
