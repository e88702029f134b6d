"""How near a completion's length is to a target: ``max(-1, -|length - target| / target)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpox.contracts import Text
from grpox.rewards import completion_text
from grpox_rewards.configs import LengthConfig


class Length:
    """0 at the target, falling linearly to -1 at length 0 and at twice the target, and -1 beyond."""

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    def __call__(
        self, *, completions: Sequence[Text], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        """One score in [-1, 0] per completion."""
        if self.config.unit == "tokens":
            lengths = [len(ids) for ids in completion_ids]
        else:
            lengths = [len(completion_text(completion)) for completion in completions]
        target = self.config.target
        return [max(-1.0, -abs(length - target) / target) for length in lengths]
