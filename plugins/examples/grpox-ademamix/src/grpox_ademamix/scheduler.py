"""Constant learning rate with a cooldown: 1, and `1 - sqrt(x)` in the last part of the run, x from 0 to 1."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from grpox_ademamix.config import CooldownConfig


class Cooldown:
    """The schedule "1 - sqrt" (arXiv 2405.18392, equation 1), as a factor of the learning rate.

    Up to the cooldown it does not depend on the length of the run, so a longer run begins like a shorter one.
    """

    def __init__(self, config: CooldownConfig) -> None:
        self.config = config

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
        """Return the schedule over `total_steps` optimizer steps, which advances once after each."""
        return LambdaLR(optimizer, lambda step: self.factor(step, total_steps))

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor of the learning rate after `step` steps."""
        if step < self.config.warmup:
            return (step + 1) / self.config.warmup
        cooldown = max(1, round(self.config.share * total_steps))
        passed = min(max(0, step - (total_steps - cooldown)), cooldown)
        return 1 - (passed / cooldown) ** 0.5
