"""Advantages of a generation batch: `r - mean_g`, over `std_g + eps`, `std_batch + eps` or nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.toolkit import ROUNDING, weighted_sum
from grpox_advantages.configs import GroupConfig, ScaledConfig


class Group:
    """`(r - mean_g) / (std_g + eps)` (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Every group with signal has the same weight, for small and for large differences of its rewards. Aggregation
    normalize_then_sum does the same for each reward function (GDPO, arXiv 2601.05242).
    """

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        # A function's terms may differ where the weighted sums are equal.
        self.signal = "functions" if config.aggregation == "normalize_then_sum" else "sum"

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


@dataclass(frozen=True)
class CentredRewards:
    """The rewards of a generation batch around their groups' means.

    A row has signal when it is scored and two scored members of its group have different rewards.
    """

    rewards: Tensor  # f64[N], NaN where every function abstained
    deviations: Tensor  # f64[N], r - mean_g; 0 without signal
    signal: Tensor  # bool[N]
    groups: Tensor  # i64[N], groups numbered from 0
    counts: Tensor  # f64[groups], scored members


def centre(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> CentredRewards:
    """Sums the reward functions and takes each group's mean over its scored members.

    Args:
        rewards: f32[N, K], finite, or NaN where a function abstained.
        weights: f32[K].
        group_ids: i64[N], any numbers in any order.
    """
    total = weighted_sum(rewards, weights)
    scored = ~total.isnan()
    names, groups = torch.unique(group_ids, return_inverse=True)
    zeros = total.new_zeros(len(names))
    counts = zeros.index_add(0, groups, scored.double())
    means = zeros.index_add(0, groups, total.nan_to_num(nan=0.0)) / counts.clamp(min=1)
    differ = _spread(total, scored, groups, len(names)) > ROUNDING
    signal = scored & differ[groups]
    deviations = torch.where(signal, total - means[groups], 0.0)
    return CentredRewards(total, deviations, signal, groups, counts)


def standardise(centred: CentredRewards, eps: float, ddof: int) -> Tensor:
    """`(r - mean_g) / (std_g + eps)`, 0 without signal: f64[N]."""
    return centred.deviations / divisors(centred, eps, ddof)


def divisors(centred: CentredRewards, eps: float, ddof: int) -> Tensor:
    """`std_g + eps` of each row's group, 1 without signal: f64[N]."""
    squares = torch.zeros_like(centred.counts).index_add(0, centred.groups, centred.deviations.square())
    std = (squares / (centred.counts - ddof).clamp(min=1)).sqrt()[centred.groups]
    # Without signal the deviation is 0, and eps may be 0 too.
    return torch.where(centred.signal, std + eps, 1.0)


def _spread(total: Tensor, scored: Tensor, groups: Tensor, size: int) -> Tensor:
    """(max - min) / max |r| over the scored members of each group, 0 for fewer than two: f64[size]."""
    lowest = total.new_full((size,), torch.inf)
    lowest = lowest.scatter_reduce(0, groups, total.masked_fill(~scored, torch.inf), "amin")
    highest = total.new_full((size,), -torch.inf)
    highest = highest.scatter_reduce(0, groups, total.masked_fill(~scored, -torch.inf), "amax")
    magnitude = torch.maximum(lowest.abs(), highest.abs())
    return torch.where(highest > lowest, (highest - lowest) / magnitude, 0.0)


def whiten(deviations: Tensor, scored: Tensor, eps: float, ddof: int) -> Tensor:
    """Divide deviations of mean 0 by their standard deviation over the batch, plus eps.

    Args:
        deviations: f64[N], 0 on rows that are not scored.
        scored: the number of scored rows.
    """
    std = (deviations.square().sum() / (scored - ddof).clamp(min=1)).sqrt()
    return deviations / (std + eps) if bool(std > 0) else deviations
