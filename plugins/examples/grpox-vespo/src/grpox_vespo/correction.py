"""The whole importance weight of each token: `R = exp(d)`, `d = log pi_old - log mu`, without a cap."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox_vespo.config import VespoCorrectionConfig

LIMIT = 20.0
"""d is clamped to this either way: past it the weight (4.9e8) heads for overflow."""


class VespoCorrection:
    """Weights without a cap, for a loss that bounds their product itself: caps on tokens would bias it."""

    def __init__(self, config: VespoCorrectionConfig) -> None:
        self.config = config

    @torch.no_grad()
    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T] (all True)."""
        known = mask & ~sampler.isnan()
        difference = torch.where(known, old - sampler, 0.0)  # f32[B, T]
        return difference.clamp(-LIMIT, LIMIT).exp(), torch.ones_like(mask)
