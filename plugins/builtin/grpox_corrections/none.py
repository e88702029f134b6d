"""No correction: `R = 1`."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox_corrections.configs import NoCorrectionConfig


class NoCorrection:
    """Every token weighs 1 and is kept, whatever the generator reported."""

    weighs_by_raw = False

    def __init__(self, config: NoCorrectionConfig) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T]."""
        return torch.ones_like(old), torch.ones_like(mask)
