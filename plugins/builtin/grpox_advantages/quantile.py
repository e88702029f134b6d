"""A quantile of the group's rewards as the baseline, in place of their mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpox_advantages.configs import QuantileConfig
from grpox_advantages.scalers import centre, divisors


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
