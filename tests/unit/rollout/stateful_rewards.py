"""Rewards with state and steps, for processes of their own."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np


class Counts:
    """Counts calls and steps; it may kill its process, and its state may be of a kind that it should not be."""

    statistics: ClassVar[dict[str, str]] = {"reward": "mean", "ratio": "gather"}

    def __init__(self) -> None:
        self.calls, self.seen, self.step = 0, [], 0

    def __call__(self, *, completions: list[str], **_: Any) -> list[float]:
        if "die" in completions:
            os._exit(3)
        self.calls += 1
        return [self.calls + 10.0 * len(self.seen) + 100.0 * self.step] * len(completions)

    def begin_step(self, context: Any) -> None:
        self.step = context.step

    def end_step(self, statistics: dict[str, Any]) -> None:
        if statistics["reward"] < 0:
            raise ValueError("a negative reward")
        self.seen.append(float(statistics["ratio"].sum()))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": self.seen if sum(self.seen) < 50 else np.array(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.seen = state["calls"], list(state["seen"])


class Forgets:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        return [1.0] * len(completions)
