"""Checks a run's folder, and reads its config and the completions to show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, brief, nearest, visible
from grpox.errors.formatting import spread
from grpox.errors.redaction import redacted
from grpox.observing.conversation import ends
from grpox.observing.page.rows import FILE, FOLDER, batch_of, key_of, read_batch, row_of
from grpox.observing.record_files import LAST_TIME, MOST_STEPS
from grpox.observing.token_files import has_tokens
from grpox.runfile.yaml_lines import leaves, read_yaml
from grpox.runtime.files import parse_json, read_small

METRICS, CONFIG, VERSIONS = "metrics.jsonl", "config.yaml", "versions.json"
SUMMARY, FAILURE = "summary.json", "failure.json"
OWN_KEYS = ("output_dir",)
"""Keys in which runs differ by nature."""
MOST_NAMED = 8
"""Largest number of runs that a message names if RUN_DIR is their parent folder."""
BOUNDS = {
    **dict.fromkeys(("total_steps", "steps"), MOST_STEPS),
    **dict.fromkeys(("parameters", "trained_parameters"), 10**18),
    **dict.fromkeys(("train_seconds", "started"), LAST_TIME),
    "world_size": 1 << 16,
}
"""Largest values of the numbers in a run's JSON files; none is negative."""

MOST_BATCHES = 8
"""Number of generation batches shown: the first, the last, and evenly spaced ones between."""
MOST_SAMPLES = 16
"""Number of completions shown per batch: the best, the worst, and evenly spaced ranks between."""
PROMPT_CHARACTERS = 400
COMPLETION_CHARACTERS = 1600
EXTRA_CHARACTERS = 200
MESSAGE_CHARACTERS = 800
MOST_MESSAGES = 16
"""Number of messages shown of a conversation: the first and the last ones."""


def read_config(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the config of the run in `folder`, as text and as data; empty without one.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = folder / CONFIG
    text = _read_text(path)
    return text, _mapping(read_yaml(text, str(path)).data, path) if text else {}


def compare(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return the keys of the configs that differ, with a value for each run; None where a run lacks the key.

    Args:
        folders: name on the page -> the run's folder.

    Raises:
        ConfigError: a config cannot be read.
    """
    configs = [dict(leaves(redacted(read_config(folder)[1]))) for folder in folders.values()]
    keys = dict.fromkeys(key for config in configs for key in config if key not in OWN_KEYS)

    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    rows = [[key, [written(config[key]) if key in config else None for config in configs]] for key in keys]
    return {"runs": list(folders), "keys": [row for row in rows if len(set(row[1])) > 1]}


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a run's; raises ConfigError."""
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


def _read_text(path: Path) -> str:
    try:
        return read_small(path) if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise ConfigError("is not a mapping", where=str(path))
    return value or {}


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON file of a run; empty without one. Raises ConfigError for what no run writes."""
    text = _read_text(path)
    try:
        content = _mapping(parse_json(text, str) if text else {}, path)
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path)) from error
    for name, value in content.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in BOUNDS and value is not None and not (is_number and 0 <= value <= BOUNDS[name]):
            what = f"{name} is {brief(value)}, no number from 0 to {BOUNDS[name]:g}"
            raise ConfigError(what, where=str(path))
        if name in ("versions", "stopped_early") and not isinstance(value, dict | None):
            raise ConfigError(f"{name} is {brief(value)}, no mapping", where=str(path))
    return content


@dataclass(frozen=True)
class SampledBatch:
    """Numbers of one generation batch, and the rows of its file that are shown."""

    label: str
    total: int
    """Number of completions in the whole batch."""
    best: float
    worst: float
    """Highest and lowest reward of the whole batch; NaN if no completion was scored."""
    mean: float
    rows: Sequence[Mapping[str, Any]]
    """Shown completions in the form of `row_of`, the best reward first; long texts are cut in the middle."""


def read_samples(folder: Path, recorded: int = 0) -> tuple[list[SampledBatch], int]:
    """Return the batches to show of a run's folder, and the number of saved batches.

    Args:
        recorded: largest number of completions of a batch that are shown because their tokens are recorded,
            beside the others.

    Raises:
        ConfigError: a file of completions cannot be read.
    """
    paths = (folder / FOLDER).glob("step_*.parquet")
    stems = sorted((path.stem for path in paths if FILE.fullmatch(path.stem)), key=batch_of)
    places = spread(len(stems), MOST_BATCHES)
    return [_sample_batch(folder, stems[place], recorded) for place in places], len(stems)


def _sample_batch(folder: Path, stem: str, recorded: int) -> SampledBatch:
    step, part = batch_of(stem)
    rows: list[dict[str, Any]] = read_batch(folder, stem).to_pylist()
    ranked = sorted(enumerate(rows), key=lambda row: (math.isnan(row[1]["reward"]), -row[1]["reward"]))
    rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    shown = set(spread(len(ranked), MOST_SAMPLES))
    if recorded:
        known = [place for place, (_, values) in enumerate(ranked) if has_tokens(folder, *key_of(stem, values))]
        shown |= {known[place] for place in spread(len(known), recorded)}
    return SampledBatch(
        label=f"step {step}" if part == 1 else f"step {step}, batch {part}",
        total=len(rows),
        best=max(rewards, default=math.nan),
        worst=min(rewards, default=math.nan),
        mean=sum(rewards) / len(rewards) if rewards else math.nan,
        rows=[_cut_row(row_of(folder, stem, *ranked[place])) for place in sorted(shown)],
    )


def _cut_row(row: dict[str, Any]) -> dict[str, Any]:
    """Cut the long texts of a row of the page; a single message, which is the completion itself, goes."""
    first, left_out, last = ends(row["messages"] if len(row["messages"]) > 1 else [], MOST_MESSAGES)
    between = [("", f"[... {left_out} messages ...]")] if left_out else []
    return {
        **row,
        "prompt": cut_text(row["prompt"], PROMPT_CHARACTERS),
        "completion": cut_text(row["completion"], COMPLETION_CHARACTERS),
        "messages": [
            [cut_text(who, EXTRA_CHARACTERS), cut_text(text, MESSAGE_CHARACTERS)]
            for who, text in (*first, *between, *last)
        ],
        "data": {name: cut_text(value, EXTRA_CHARACTERS) for name, value in row["data"].items()},
        "extra": {name: cut_text(value, EXTRA_CHARACTERS) for name, value in row["extra"].items()},
    }


def cut_text(text: str, most: int) -> str:
    """Cut a text in its middle to `most` characters, and escape invisible ones."""
    if len(text) > most:
        left_out = len(text) - most
        text = f"{text[: most // 2]}\n[... {left_out} characters ...]\n{text[len(text) - most // 2 :]}"
    return visible(text)


@dataclass(frozen=True)
class Curve:
    """Values over steps; NaN leaves a gap."""

    steps: list[float]
    values: list[float]


def binned(curve: Curve, most: int = 200) -> Curve:
    """Reduce a curve to at most `most` points: means of the finite values of neighbouring steps."""
    size = math.ceil(len(curve.steps) / most)
    if size <= 1:
        return curve
    starts = range(0, len(curve.steps), size)
    return Curve(
        [_mean(curve.steps[start : start + size]) for start in starts],
        [_mean(curve.values[start : start + size]) for start in starts],
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
