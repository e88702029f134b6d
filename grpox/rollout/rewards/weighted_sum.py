"""The reward of a completion: `r = sum_k weight_k * R_k` over the functions that did not abstain."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Rewards whose spread is at most this share of the largest are equal: 0.1 + 0.2 and 0.3 + 0, as float32."""


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each row, without re-weighting the rest where a function abstained.

    Args:
        rewards: f32[N, K], finite, or NaN where function k abstained.
        weights: f32[K].

    Returns:
        f64[N], NaN where every function abstained.
    """
    scored = ~rewards.isnan()
    terms = torch.where(scored, rewards.double(), 0.0) * weights.double()
    # One function after the other: rows with equal rewards then have sums equal to the last bit.
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for term in terms.unbind(dim=1):
        total = total + term
    # Terms that cancel but for rounding add up to 0: an advantage would divide that rounding by itself.
    total = torch.where(total.abs() > ROUNDING * terms.abs().sum(dim=1), total, 0.0)
    return total.masked_fill(~scored.any(dim=1), torch.nan)
