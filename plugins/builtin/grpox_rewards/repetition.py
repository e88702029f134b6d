"""A penalty for repetition: the share of n-grams that repeat an earlier one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import RepetitionConfig
from grpox_rewards.text import model_tokens


class Repetition:
    """`distinct n-grams / n-grams - 1`, 0 for fewer than `size` units (arXiv 2502.03373, appendix C.2)."""

    def __init__(self, config: RepetitionConfig) -> None:
        self.config = config

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        model_masks: Sequence[Sequence[bool]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score in (-1, 0] per completion."""
        if self.config.unit == "tokens":
            return [self._score(ids) for ids in model_tokens(completion_ids, model_masks)]
        return [self._score(completion_text(completion).lower().split()) for completion in completions]

    def _score(self, units: Sequence[Hashable]) -> float:
        size = self.config.size
        grams = [tuple(units[start : start + size]) for start in range(len(units) - size + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
