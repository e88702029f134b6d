"""Maximum likelihood RL: the deviation from the group's mean, divided by that mean."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from grpox_advantages.configs import MaxRlConfig
from grpox_advantages.scalers import centre


class MaxRl:
    """`(r - mean_g) / mean_g` (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 the mean is the share p of right answers, and dividing by it makes the gradient that
    of log p instead of p: rare successes weigh more. No epsilon is needed, because the mean of rewards that are
    at least 0 and not all alike is above 0. A group of zeros has advantage 0, like every group without signal.
    """

    needs_nonnegative_rewards: ClassVar[bool] = True

    def __init__(self, config: MaxRlConfig) -> None:
        self.config = config

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
