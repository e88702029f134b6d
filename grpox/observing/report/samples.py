"""Picks from the saved completions those that the report shows: few steps, each from its best to its worst."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem, text_of

MOST_BATCHES = 8
"""Generation batches shown of a run: the first, the last, and between them evenly spaced ones."""
MOST_SAMPLES = 16
"""Completions shown of a batch: the best, the worst, and between them evenly spaced ranks."""
PROMPT_CHARACTERS = 400
COMPLETION_CHARACTERS = 1600
EXTRA_CHARACTERS = 200

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of the text after them."""


@dataclass(frozen=True)
class Sample:
    """One completion as the page shows it; its texts are cut in the middle where they are long."""

    prompt: str
    completion: str
    reward: float
    """NaN when every reward function abstained."""
    advantage: float
    rewards: Mapping[str, float | None]
    extra: Mapping[str, str]
    group: int
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class SampledBatch:
    """What is shown of one generation batch."""

    label: str
    total: int
    """Completions of the whole batch."""
    best: float
    worst: float
    """Highest and lowest reward of the whole batch; NaN when nothing was scored."""
    mean: float
    samples: list[Sample]


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 to count-1, evenly spaced, the first and the last included."""
    picked = min(count, most)
    return [round(place * (count - 1) / max(picked - 1, 1)) for place in range(picked)]


def read_samples(folder: Path) -> tuple[list[SampledBatch], int]:
    """The batches to show of a run's folder, and how many it has saved.

    Raises:
        ConfigError: a file of completions cannot be read.
    """
    files = _saved(folder / "completions")
    return [_read_batch(*files[place]) for place in spread(len(files), MOST_BATCHES)], len(files)


def _saved(folder: Path) -> list[tuple[int, int, Path]]:
    """(step, part, file) of each file, in the order of the run: names stop sorting at a million steps."""
    found = []
    for path in folder.glob("step_*.parquet"):
        name = re.fullmatch(r"step_(\d+)(?:_(\d+))?", path.stem)
        if name:
            found.append((int(name[1]), int(name[2] or 1), path))
    return sorted(found)


def _read_batch(step: int, part: int, path: Path) -> SampledBatch:
    import pyarrow
    from pyarrow import parquet

    try:
        # Without threads, which cannot be started where a run has ended for want of memory.
        table = parquet.read_table(path, use_threads=False, pre_buffer=False)
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(Problem(f"cannot be read as parquet: {text_of(error)}", where=str(path))) from error
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
        rewards={name.removeprefix("rewards/"): row[name] for name in row if name.startswith("rewards/")},
        extra={
            name.removeprefix("extra/"): _shown(str(row[name]), EXTRA_CHARACTERS)
            for name in row
            if name.startswith("extra/") and row[name] is not None
        },
        group=row["group"],
        tokens=row["completion_length"],
        finish_reason=row["finish_reason"],
    )


def _shown(text: str, most: int) -> str:
    """At most `most` characters, half of them the start and half the end; invisible ones as escapes."""
    if len(text) > most:
        left_out = len(text) - most
        text = f"{text[: most // 2]}\n[... {left_out} characters ...]\n{text[len(text) - most // 2 :]}"
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
