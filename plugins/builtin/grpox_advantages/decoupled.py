"""GDPO: `A = s / (std_batch(s) + eps)`, `s = sum_k weight_k (R_k - mean_g,k) / (std_g,k + eps)`."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox.rollout.rewards.weighted_sum import ROUNDING
from grpox_advantages.centring import centre, standardise


def normalize_then_sum(rewards: Tensor, weights: Tensor, group_ids: Tensor, eps: float, ddof: int) -> Tensor:
    """Each function scaled within the group, summed, whitened over the batch (arXiv 2601.05242).

    A function adds 0 to a row on which it abstained, and to a group in which it scored fewer than two rows, or
    all alike. Whitening subtracts no mean, because that is 0: a function's terms add up to 0 in each group.

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
    # What cancels but for rounding is 0: with eps 0 whitening would blow it up.
    total = torch.where(total.abs() > ROUNDING * terms.abs().sum(dim=1), total, 0.0)
    scored = (~rewards.isnan()).any(dim=1).sum()
    std = (total.square().sum() / (scored - ddof).clamp(min=1)).sqrt()
    return total / (std + eps) if bool(std > 0) else total
