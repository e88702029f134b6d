"""Advantages with another baseline or divisor than the group's mean and standard deviation."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs
from grpox_advantages.configs import QuantileConfig, ScaledConfig
from grpox_advantages.scalers import centre, divisors, whiten


class Rloo:
    """`r_i - mean_{j != i} r_j`, the mean over the scored members of the group (arXiv 2402.14740).

    The baseline of a completion does not contain its own reward, so that the policy gradient is unbiased. With
    n scored members the advantage is `n / (n - 1)` times `r - mean_g`.
    """

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        centred = centre(rewards, weights, group_ids)
        counts = centred.counts[centred.groups]
        # A group of one has no signal: its deviation is 0, whatever the factor.
        return (centred.deviations * counts / (counts - 1).clamp(min=1)).float()


class ReinforcePlusPlus:
    """`(r - mean_g) / (std_batch(r - mean_g) + eps)` (REINFORCE++-baseline, arXiv 2501.03262).

    The standard deviation is that of the differences, and not of the rewards as in batch: groups of different
    difficulty do not widen it. The paper's whitening also subtracts the mean of the differences, which is 0.
    """

    def __init__(self, config: ScaledConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        centred = centre(rewards, weights, group_ids)
        scored = (~centred.rewards.isnan()).sum()
        return whiten(centred.deviations, scored, self.config.eps, self.config.ddof).float()


class MaxRl:
    """`(r - mean_g) / mean_g` (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 the mean is the share p of right answers, and dividing by it makes the gradient that
    of log p instead of p: rare successes weigh more. No epsilon is needed, because the mean of rewards that are
    at least 0 and not all alike is above 0. A group of zeros has advantage 0, like every group without signal.
    """

    needs_nonnegative_rewards: ClassVar[bool] = True

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N].

        Raises:
            ValueError: a weighted sum of rewards is below 0, where the mean is no likelihood.
        """
        centred = centre(rewards, weights, group_ids)
        lowest = centred.rewards.nan_to_num(nan=0.0).min().item() if len(rewards) else 0.0
        if lowest < 0:
            cure = "shift the rewards, or use advantage 'group' or 'none'"
            raise ValueError(f"maxrl divides by the mean reward, which must not be below 0: {lowest:g}; {cure}")
        means = centred.rewards - centred.deviations  # f64[N], mean_g on rows with signal
        return torch.where(centred.signal, centred.deviations / means, 0.0).float()


class Opo:
    """`r - sum_j n_j r_j / sum_j n_j` over the scored members of the group (OPO, arXiv 2505.23585).

    This baseline minimises the variance of the policy gradient, if the squared gradient of a completion is
    proportional to its length. n_j counts the tokens that the model wrote.
    """

    signal = "sum"

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        """Return the advantages of N completions, f32[N]; they need not add up to 0 in a group."""
        centred = centre(inputs.rewards, inputs.weights, inputs.group_ids)
        lengths = torch.stack([mask.sum() for mask in inputs.model_masks]).to(centred.deviations)  # f64[N]
        lengths = torch.where(centred.rewards.isnan(), 0.0, lengths)
        zeros = torch.zeros_like(centred.counts)
        total = zeros.index_add(0, centred.groups, lengths)
        # Deviations from the plain mean in place of rewards: the result is the same, and rounds less.
        weighted = zeros.index_add(0, centred.groups, lengths * centred.deviations)
        shift = (weighted / total.clamp(min=1))[centred.groups]
        return torch.where(centred.signal, centred.deviations - shift, 0.0).float()


class Quantile:
    """`(r - Q_q) / (std_g + eps)`, Q_q the q-quantile of the group (QAE, arXiv 2509.22611).

    Q_q is the smallest reward x of the group for which at least a share q of the scored members has r <= x. For
    rewards of 0 and 1 it is 0 where at most 1 - q of the members are right, so that only successes are
    reinforced, and 1 in easier groups, so that only failures are punished.

    The authors' code takes ``torch.quantile`` instead, which interpolates between neighbouring rewards; for
    rewards of 0 and 1 the two differ only where the quantile lies between a 0 and a 1. The divisor is GRPO's,
    as theirs is: the standard deviation around the mean, and not around Q_q.
    """

    def __init__(self, config: QuantileConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        centred = centre(rewards, weights, group_ids)
        quantiles = torch.zeros_like(centred.counts)  # of the deviations: f64[groups]
        for group in torch.unique(centred.groups[centred.signal]).tolist():
            members = centred.deviations[(centred.groups == group) & centred.signal].sort().values
            quantiles[group] = members[rank_of(self.config.q, len(members))]
        shifted = torch.where(centred.signal, centred.deviations - quantiles[centred.groups], 0.0)
        return (shifted / divisors(centred, self.config.eps, self.config.ddof)).float()


def rank_of(q: float, count: int) -> int:
    """Return the place, from 0, of the q-quantile among `count` sorted numbers: one below ceil(q * count).

    0.07 of 100 is the seventh, though 0.07 * 100 is just above 7 in floating point.
    """
    return max(0, math.ceil(q * count - 1e-9) - 1)
