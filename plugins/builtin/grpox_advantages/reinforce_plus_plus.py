"""REINFORCE++ with a group baseline: rewards are centred by group, then whitened over the batch."""

from __future__ import annotations

from torch import Tensor

from grpox_advantages.configs import ScaledConfig
from grpox_advantages.scalers import centre, whiten


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
