"""AdEMAMix: `w -= lr ((m1 / (1 - b1^t) + alpha m2) / (sqrt(v / (1 - b2^t)) + eps) + decay w)`.

m1 and m2 are a fast and a slow mean of the gradients, v the mean of their squares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpox_ademamix.config import AdEMAMixConfig


class AdEMAMix:
    """AdEMAMix (arXiv 2409.03137, algorithm 1), without its schedules of alpha and beta3."""

    def __init__(self, config: AdEMAMixConfig) -> None:
        self.config = config

    def build(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return the optimizer; the schedule changes ``lr`` in its groups before each step."""
        return _AdEMAMix(parameters, {"lr": learning_rate, **self.config.model_dump()})


class _AdEMAMix(torch.optim.Optimizer):
    """Treats each weight by itself: ZeRO-3 gives a rank a flat part of the parameters, without their shapes."""

    def __init__(self, parameters: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients; the means are in the state, which checkpoints save."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._change(weight, weight.grad, group)

    def _change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["steps"] = 0
            state |= {name: torch.zeros_like(weight) for name in ("fast", "slow", "square")}
        state["steps"] += 1
        fast, slow, square, steps = state["fast"], state["slow"], state["square"], state["steps"]
        fast.lerp_(gradient, 1 - group["beta1"])
        slow.lerp_(gradient, 1 - group["beta3"])
        square.lerp_(gradient.square(), 1 - group["beta2"])
        # The slow mean begins at 0 and is not corrected for it: its weight grows over the first steps.
        mean = fast / (1 - group["beta1"] ** steps) + group["alpha"] * slow
        scale = (square / (1 - group["beta2"] ** steps)).sqrt() + group["epsilon"]
        weight.sub_(group["lr"] * (mean / scale + group["weight_decay"] * weight))
