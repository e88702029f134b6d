"""How near a completion's length is to a target: ``max(-1, -|length - target| / target)``, or in units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpox.contracts import Text, completion_text
from grpox_rewards.configs import LengthConfig


class Length:
    """0 at the target. Relative: -1 at 0 and from twice the target on. Absolute: ``-|length - target|``."""

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    def __call__(
        self, *, completions: Sequence[Text], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        """One score per completion: in [-1, 0] if relative, else at most 0."""
        if self.config.unit == "tokens":
            lengths = [len(ids) for ids in completion_ids]
        else:
            lengths = [len(completion_text(completion)) for completion in completions]
        return [self._score(abs(length - self.config.target)) for length in lengths]

    def _score(self, distance: int) -> float:
        if self.config.scale == "absolute":
            return -float(distance)
        return max(-1.0, -distance / self.config.target)
