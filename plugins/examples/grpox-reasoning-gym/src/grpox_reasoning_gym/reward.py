"""The reward component: `score_answer(answer of the completion, entry)`, by the scorer of the row's task."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpox.contracts import Text, completion_text

from grpox_reasoning_gym.rows import build_dataset, read_entry

if TYPE_CHECKING:
    from grpox_reasoning_gym.config import RewardConfig

Scorer = Callable[[str | None, Mapping[str, Any]], float]
KEYS = {"question", "answer", "metadata"}
"""Keys of every entry of reasoning-gym."""


class ReasoningGymReward:
    """From 0 to 1 by the task's own scorer, None in rows that are not reasoning-gym's.

    A missing answer scores what the task gives for none, which is 0 in nearly all. An answer that the scorer
    cannot read scores 0: some scorers raise then.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        task: Sequence[str | None],
        settings: Sequence[str | None],
        entry: Sequence[str | None],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """One score for each completion. The mean of each task is logged as ``reasoning-gym/<task>``."""
        scores: list[float | None] = []
        of_task: dict[str, list[float]] = defaultdict(list)
        for completion, name, given, text in zip(completions, task, settings, entry, strict=True):
            known = _entry(text)
            if known is None or name is None:
                scores.append(None)
                continue
            score = self._score(completion_text(completion), known, _scorer(name, given or "{}"))
            scores.append(score)
            of_task[name].append(score)
        if log_metric is not None:
            for name, values in of_task.items():
                log_metric(f"reasoning-gym/{name}", sum(values) / len(values))
        return scores

    def _score(self, completion: str, entry: Mapping[str, Any], scorer: Scorer) -> float:
        try:
            return float(scorer(self._answer(completion), entry))
        except Exception:  # noqa: BLE001 - scorers parse what a policy wrote, each with errors of its own
            return 0.0

    def _answer(self, completion: str) -> str | None:
        """The part of a completion that answers; None where there is none."""
        if self.config.answer == "tags":
            from reasoning_gym.utils import extract_answer

            answer: str | None = extract_answer(completion)
            return answer
        whole = completion.strip()
        if whole and self.config.answer == "last-line":
            return whole.splitlines()[-1].strip()
        return whole or None


def _entry(text: str | None) -> Mapping[str, Any] | None:
    """The entry that `text` holds, None where that is something else."""
    try:
        entry = None if text is None else read_entry(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and entry.keys() >= KEYS else None


@lru_cache(maxsize=256)
def _scorer(task: str, settings: str) -> Scorer:
    """The scorer of a task under the settings that made the row: several depend on them.

    Raises:
        ConfigError: reasoning-gym has no such task, or it refuses the settings.
    """
    scorer: Scorer = build_dataset(task, json.loads(settings), "reasoning-gym").score_answer
    return scorer
