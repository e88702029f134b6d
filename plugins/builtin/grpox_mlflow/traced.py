"""Rollouts that are to be traces in MLflow: drawn from each generation batch and kept in the run's folder.

MLflow takes about thirteen traces a second. So a few are drawn, and the thread that writes ships them from
there.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpox.contracts import ScoredRollout

FILE = "traces.jsonl"
TEXT_LENGTH = 20_000
"""Characters kept of a prompt or completion."""


class TracedRollouts:
    """Appends to ``traces.jsonl``, one JSON object a rollout.

    Args:
        folder: the run's.
        most: rollouts drawn from each generation batch, the same ones in a run that is resumed.
        seed: the run's.
    """

    def __init__(self, folder: Path, most: int, seed: int) -> None:
        self._path = folder / FILE
        self._most, self._seed = most, seed
        self._drawn: list[dict[str, Any]] = []
        self._batches = 0

    def go_back(self, step: int) -> None:
        """Forget what was kept of the steps after `step`: they are taken again."""
        with suppress(OSError):
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            before = [line for line in lines if line.endswith("\n") and _step(line) <= step]
            if len(before) < len(lines):
                self._path.write_text("".join(before), encoding="utf-8")

    def draw(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        """Keep some of a batch that is first used in `step`, until its times are known."""
        if not self._most or not rollouts:
            return
        now = time.time()
        rows = range(len(rollouts))
        self._batches += 1
        chance = random.Random(f"{self._seed}/{step}/{self._batches}")
        for row in sorted(chance.sample(rows, min(self._most, len(rollouts)))):
            told = _told(rollouts[row])
            self._drawn.append({"step": step, "batch": self._batches, "row": row, "time": now, **told})

    def write(self, metrics: Mapping[str, float]) -> None:
        """What was drawn, with the seconds that sampling and scoring took by the metrics of the step.

        A disk that is full loses them: they are a sample, and everything is in the files of completions.
        """
        drawn, self._drawn, self._batches = self._drawn, [], 0
        if not drawn:
            return
        seconds = {
            name: metrics[f"time/{name}"] for name in ("generate", "reward") if f"time/{name}" in metrics
        }
        lines = [json.dumps({**each, "seconds": seconds}, ensure_ascii=False, default=str) for each in drawn]
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def _told(scored: ScoredRollout) -> dict[str, Any]:
    rollout = scored.rollout
    return {
        "group": rollout.group_id,
        "sample": rollout.sample,
        "prompt": _cut(scored.prompt),
        "completion": _cut(scored.completion),
        "reward": _number(scored.reward),
        "rewards": {name: _number(value) for name, value in scored.rewards.items()},
        "advantage": _number(scored.advantage),
        "extra": {
            name: value if isinstance(value, bool | int) else str(value) for name, value in scored.extra.items()
        },
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "prompt_tokens": len(rollout.prompt_ids),
        "completion_tokens": len(rollout.completion_ids),
    }


def _number(value: float | None) -> float | None:
    """JSON has no number for NaN, which here means that nobody scored."""
    return value if value is not None and math.isfinite(value) else None


def _cut(text: str) -> str:
    if len(text) <= TEXT_LENGTH:
        return text
    half = TEXT_LENGTH // 2
    return f"{text[:half]}\n[... {len(text) - TEXT_LENGTH} characters ...]\n{text[-half:]}"


def _step(line: str) -> float:
    """The step of a line; infinite of what is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
