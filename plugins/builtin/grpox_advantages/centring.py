"""Rewards of a generation batch around the means of their groups, where every built-in advantage begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpox.toolkit import ROUNDING, weighted_sum


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
