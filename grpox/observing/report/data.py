"""Reads a run's folder back: metrics, evaluations, config, outcome, and the completions to show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpox.errors import ConfigError, nearest, text_of
from grpox.observing.record_files import MetricsLine
from grpox.runfile.yaml_lines import read_yaml

METRICS = "metrics.jsonl"
MOST_NAMED = 8
"""Largest number of runs that a message names if RUN_DIR is their parent folder."""

Status = Literal["finished", "failed", "unfinished"]

MOST_BATCHES = 8
"""Number of generation batches shown: the first, the last, and evenly spaced ones between."""
MOST_SAMPLES = 16
"""Number of completions shown per batch: the best, the worst, and evenly spaced ranks between."""
PROMPT_CHARACTERS = 400
COMPLETION_CHARACTERS = 1600
EXTRA_CHARACTERS = 200
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and characters that change the direction of text."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run; missing parts are empty."""

    folder: Path
    steps: list[MetricsLine]
    """Entries in order; for a repeated step, the last one."""
    evaluations: list[MetricsLine]
    config_text: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    git_commit: str | None
    source: str
    """Name of the run file or recipe as the user wrote it."""
    summary: Mapping[str, Any]
    error: str
    """Error that ended a failed run."""

    @property
    def status(self) -> Status:
        """Status of the run; an unfinished one is still running, or its process was killed."""
        if self.summary:
            return "finished"
        return "failed" if self.error else "unfinished"

    @property
    def seconds(self) -> float:
        """Seconds of training; without a summary, from the first to the last line of metrics."""
        if "train_seconds" in self.summary:
            return float(self.summary["train_seconds"])
        times = [recorded.time for recorded in (*self.steps, *self.evaluations)]
        return max(times) - min(times)


def read_record(folder: Path) -> RunRecord:
    """Read the record of the run in `folder`.

    Raises:
        ConfigError: `folder` is not a run's folder, or one of its files cannot be read.
    """
    _check_folder(folder)
    steps, evaluations = _read_metrics(folder / METRICS)
    path = folder / "config.yaml"
    config_text = _read_text(path)
    versions, summary = (_read_json(folder / name) for name in ("versions.json", "summary.json"))
    return RunRecord(
        folder=folder,
        steps=steps,
        evaluations=evaluations,
        config_text=config_text,
        config=_mapping(read_yaml(config_text, str(path)).data, path) if config_text else {},
        versions=versions.get("versions", {}),
        git_commit=versions.get("git_commit"),
        source=versions.get("source") or folder.name,
        summary=summary,
        error=_read_json(folder / "failure.json").get("error", ""),
    )


def _check_folder(folder: Path) -> None:
    if (folder / METRICS).is_file():
        return
    if folder.is_dir():
        what = f"is not the folder of a run with a finished step: {METRICS} is missing"
        near = folder.parent if (folder.parent / METRICS).is_file() else None
    else:
        what = "is a file: name the run's folder" if folder.exists() else "there is no such folder"
        name = nearest(folder.name, _runs_in(folder.parent))
        near = folder.parent if folder.exists() else folder.parent / name if name else None
    inside = ", ".join(str(folder / name) for name in _runs_in(folder)[:MOST_NAMED])
    raise ConfigError(what, key="RUN_DIR", given=str(folder), allowed=inside, nearest=str(near) if near else "")


def _runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))


def _read_metrics(path: Path) -> tuple[list[MetricsLine], list[MetricsLine]]:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    entries: dict[bool, dict[int, MetricsLine]] = {False: {}, True: {}}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = MetricsLine.parse(line)
            entries[parsed.is_evaluation][parsed.step] = parsed
        except ValueError as error:
            # A process that was killed may have left half a line at the end.
            if number < len(lines):
                raise ConfigError(f"not a line of metrics: {error}", where=f"{path}:{number}") from error
    if not any(entries.values()):
        raise ConfigError("has no finished step and no evaluation", where=str(path))
    steps, evaluations = ([of[step] for step in sorted(of)] for of in entries.values())
    return steps, evaluations


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", where=str(path)) from error


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise ConfigError("is not a mapping", where=str(path))
    return value or {}


def _read_json(path: Path) -> Mapping[str, Any]:
    text = _read_text(path)
    try:
        return _mapping(json.loads(text) if text else {}, path)
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path)) from error


@dataclass(frozen=True)
class Sample:
    """One completion as the page shows it; long texts are cut in the middle."""

    prompt: str
    completion: str
    reward: float
    """Weighted reward; NaN if every reward function abstained."""
    advantage: float
    rewards: Mapping[str, float | None]
    extra: Mapping[str, str]
    group: int
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class SampledBatch:
    """Numbers and samples of one generation batch."""

    label: str
    total: int
    """Number of completions in the whole batch."""
    best: float
    worst: float
    """Highest and lowest reward of the whole batch; NaN if no completion was scored."""
    mean: float
    samples: list[Sample]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0 to count-1, evenly spaced, including first and last."""
    picked = min(count, most)
    return [round(place * (count - 1) / max(picked - 1, 1)) for place in range(picked)]


def read_samples(folder: Path) -> tuple[list[SampledBatch], int]:
    """Return the batches to show of a run's folder, and the number of saved batches.

    Raises:
        ConfigError: a file of completions cannot be read.
    """
    files = []
    for path in (folder / "completions").glob("step_*.parquet"):
        if name := re.fullmatch(r"step_(\d+)(?:_(\d+))?", path.stem):
            files.append((int(name[1]), int(name[2] or 1), path))
    files.sort()  # in the order of the run: names stop sorting at a million steps
    return [_read_batch(*files[place]) for place in spread(len(files), MOST_BATCHES)], len(files)


def _read_batch(step: int, part: int, path: Path) -> SampledBatch:
    import pyarrow
    from pyarrow import parquet

    try:
        # Without threads, which cannot start after a run has run out of memory.
        table = parquet.read_table(path, use_threads=False, pre_buffer=False)
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"cannot be read as parquet: {text_of(error)}", where=str(path)) from error
    ranked = sorted(rows, key=lambda row: (math.isnan(row["reward"]), -row["reward"]))
    rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    return SampledBatch(
        label=f"step {step}" if part == 1 else f"step {step}, batch {part}",
        total=len(rows),
        best=max(rewards, default=math.nan),
        worst=min(rewards, default=math.nan),
        mean=sum(rewards) / len(rewards) if rewards else math.nan,
        samples=[_sample(ranked[place]) for place in spread(len(ranked), MOST_SAMPLES)],
    )


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        prompt=_shown(row["prompt"], PROMPT_CHARACTERS),
        completion=_shown(row["completion"], COMPLETION_CHARACTERS),
        reward=row["reward"],
        advantage=row["advantage"],
        rewards=_below(row, "rewards/"),
        extra={
            name: _shown(str(value), EXTRA_CHARACTERS)
            for name, value in {**_below(row, "extra/"), "rollout": row.get("rollout_extra")}.items()
            if value is not None
        },
        group=row["group"],
        tokens=row["completion_length"],
        finish_reason=row["finish_reason"],
    )


def _below(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}


def _shown(text: str, most: int) -> str:
    """Cut a text in its middle to `most` characters, and escape invisible ones."""
    if len(text) > most:
        left_out = len(text) - most
        text = f"{text[: most // 2]}\n[... {left_out} characters ...]\n{text[len(text) - most // 2 :]}"
    return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
