"""Truncated importance sampling: `R = min(exp(d), cap)`, `d = (log pi_old - log mu) m`."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox_corrections.configs import TokenTruncateConfig
from grpox_corrections.difference import of_tokens, truncated


class TokenTruncate:
    """Each token weighted by how much likelier the trainer finds it than the generator did, up to a cap.

    Truncation bounds the variance and drops no token (Yao et al. 2025).
    """

    def __init__(self, config: TokenTruncateConfig) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T] (all True).

        Masked tokens, and those whose sampler log-probability is NaN, weigh 1.
        """
        difference = of_tokens(old, sampler, mask)
        return truncated(difference, self.config.cap, old.dtype), torch.ones_like(mask)
