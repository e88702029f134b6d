"""A reward that falls with the length of right answers and rises with the length of wrong ones: half a
cosine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from grpox.contracts import Text
from grpox_rewards.configs import CosineConfig, ExactConfig, MathConfig
from grpox_rewards.text import Exact, model_tokens


class Cosine:
    """`end + (start - end) (1 + cos(pi length / max_length)) / 2`, with start and end by correctness.

    A right answer scores `max_value_correct` at length 0 and `min_value_correct` at max_length. A wrong one
    scores `min_value_wrong` and `max_value_wrong`: a short wrong answer is the worst, so that the model thinks
    longer where it fails (arXiv 2502.03373, appendix C.1). Lengths are in tokens that the model wrote,
    including the ending EOS.
    """

    def __init__(self, config: CosineConfig) -> None:
        self.config = config
        self.reads_columns = config.reads_columns
        self._judge = _judge(config)

    def __call__(
        self,
        *,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        log_metric: Callable[[str, float], None] | None = None,
        model_masks: Sequence[Sequence[bool]] | None = None,
        prompt_ends: Sequence[str] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None if the judge of correctness abstains."""
        given = columns | {"completions": completions, "log_metric": log_metric, "prompt_ends": prompt_ends}
        verdicts: list[float | None] = self._judge(**given)
        return [
            None if verdict is None else self._score(verdict > 0, len(ids))
            for verdict, ids in zip(verdicts, model_tokens(completion_ids, model_masks), strict=True)
        ]

    def _score(self, is_right: bool, length: int) -> float:
        config = self.config
        if length > config.max_length and config.exceeded is not None:
            return config.exceeded
        start, end = config.max_value_correct, config.min_value_correct
        if not is_right:
            start, end = config.min_value_wrong, config.max_value_wrong
        progress = min(1.0, length / config.max_length)
        return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def _judge(config: CosineConfig) -> Callable[..., list[float | None]]:
    """Build the reward that judges correctness."""
    if config.correct_by == "math":
        from grpox_rewards.math import Math

        return Math(MathConfig(column=config.column))
    return Exact(ExactConfig(column=config.column))
