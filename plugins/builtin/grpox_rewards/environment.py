"""The reward that an environment gives its own episode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpox.contracts import FailedScore
from grpox_rewards.configs import EnvironmentConfig


class EnvironmentReward:
    """The sum of the parts of the environment's reward, or one part; None where the environment abstained."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config

    def __call__(
        self, *, environment_rewards: Sequence[Mapping[str, float] | None], **columns: Any
    ) -> list[float | None]:
        """Return one score per completion."""
        return [None if parts is None else self._score(parts) for parts in environment_rewards]

    def _score(self, parts: Mapping[str, float]) -> float:
        name = self.config.part
        if name is None:
            return math.fsum(parts.values())
        if name in parts:
            return parts[name]
        known = "a single number, which has no parts" if set(parts) == {""} else ", ".join(map(repr, parts))
        return FailedScore(f"the environment's reward has no part {name!r}; it has {known or 'none'}")
