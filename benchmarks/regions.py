"""Seconds of named parts of the update, each without the parts within it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import grpox.policy.logprobs
import grpox.update.policy_update
from grpox.policy.engine import Engine
from grpox.update.objective import StepLoss
from grpox.update.token_metrics import TokenMetrics

Place = tuple[Any, str]
PARTS: dict[str, tuple[Place, ...]] = {
    "forward: body": ((Engine, "__call__"),),
    "forward: head, log-probabilities": ((grpox.policy.logprobs, "chosen_logprobs"),),
    "log-probabilities outside the model": ((grpox.update.policy_update, "completion_logprobs"),),
    "loss": ((StepLoss, "micro_batch"),),
    "backward": ((Engine, "backward"),),
    "optimizer": ((Engine, "step"),),
    "are weights finite": ((Engine, "finite"), (Engine, "measure_weights")),
    "metrics": (
        (grpox.update.policy_update, "measure"),
        (TokenMetrics, "reduce"),
    ),
}
"""Functions of each part; what a version of the core does not have is left out."""
REST = "the rest of the update"


class Regions:
    """Once `install`ed, adds up the seconds of each part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def install(self) -> None:
        for part, places in PARTS.items():
            for owner, name in places:
                if hasattr(owner, name):
                    setattr(owner, name, self.counting(part, getattr(owner, name)))

    def counting(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its calls counted as `part`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return counted

    def take(self) -> dict[str, float]:
        """The seconds so far; counting starts over."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    def _turn(self) -> None:
        """Give the time since the last turn to the innermost part that is open."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
