"""Advantages of a generation batch: `r - mean_g`, over `std_g + eps`, `std_batch + eps` or nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox.toolkit import ROUNDING
from grpox_advantages.centring import centre, standardise, whiten
from grpox_advantages.configs import CentredConfig, GroupConfig, ScaledConfig


class Group:
    """`(r - mean_g) / (std_g + eps)` (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Every group with signal has the same weight, for small and for large differences of its rewards. Aggregation
    normalize_then_sum does the same for each reward function (GDPO, arXiv 2601.05242).
    """

    def __init__(self, config: GroupConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        eps, ddof = self.config.eps, self.config.ddof
        if self.config.aggregation == "normalize_then_sum":
            return normalize_then_sum(rewards, weights, group_ids, eps, ddof).float()
        return standardise(centre(rewards, weights, group_ids), eps, ddof).float()


class Batch:
    """`(r - mean_g) / (std_batch + eps)`, the standard deviation of the raw r (arXiv 2508.08221).

    Unlike division by std_g, it does not enlarge the small differences of a nearly uniform group.
    """

    def __init__(self, config: ScaledConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        centred = centre(rewards, weights, group_ids)
        if not centred.signal.any():
            return centred.deviations.float()
        scored = centred.rewards[~centred.rewards.isnan()]
        return (centred.deviations / (scored.std(correction=self.config.ddof) + self.config.eps)).float()


class Centred:
    """`r - mean_g`, on the scale of the rewards (Dr. GRPO, arXiv 2503.20783)."""

    def __init__(self, config: CentredConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        return centre(rewards, weights, group_ids).deviations.float()


def normalize_then_sum(rewards: Tensor, weights: Tensor, group_ids: Tensor, eps: float, ddof: int) -> Tensor:
    """Each function scaled within the group, summed, whitened over the batch (arXiv 2601.05242).

    A function adds 0 to a row on which it abstained, and to a group in which it scored fewer than two rows or
    gave equal scores. Whitening subtracts no mean, because a function's terms sum to 0 in each group.

    Args:
        rewards: f32[N, K], finite, or NaN where a function abstained.
        weights: f32[K].
        group_ids: i64[N].

    Returns:
        f64[N]; rows on which every function abstained are 0 and count in no statistic.
    """
    one = rewards.new_ones(1)
    terms = torch.zeros_like(rewards, dtype=torch.float64)
    for k, weight in enumerate(weights.double()):
        terms[:, k] = weight * standardise(centre(rewards[:, k : k + 1], one, group_ids), eps, ddof)
    total = terms.sum(dim=1)
    # Rounding errors around 0 are set to 0: with eps 0 whitening would enlarge them.
    total = torch.where(total.abs() > ROUNDING * terms.abs().sum(dim=1), total, 0.0)
    return whiten(total, (~rewards.isnan()).any(dim=1).sum(), eps, ddof)
