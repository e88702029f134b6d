"""The soft overlong punishment: ``min(0, max(-1, (max_length - buffer - length) / buffer))``.

Source: DAPO, arXiv 2503.14476, equation 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpox_rewards.configs import SoftOverlongConfig


class SoftOverlong:
    """0 up to ``max_length - buffer`` tokens, falling linearly to -1 at `max_length`, and -1 beyond."""

    def __init__(self, config: SoftOverlongConfig) -> None:
        self.config = config

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """One score in [-1, 0] per completion."""
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, length: int) -> float:
        limit, buffer = self.config.max_length, self.config.buffer
        if length <= limit - buffer:
            return 0.0
        return -1.0 if length > limit else (limit - buffer - length) / buffer
