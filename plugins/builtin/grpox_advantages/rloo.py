"""The leave-one-out baseline: `r_i - mean of the other rewards of the group`."""

from __future__ import annotations

from torch import Tensor

from grpox_advantages.configs import RlooConfig
from grpox_advantages.scalers import centre


class Rloo:
    """`r_i - mean_{j != i} r_j`, the mean over the scored members of the group (arXiv 2402.14740).

    The baseline of a completion does not contain its own reward, so that the policy gradient is unbiased. With
    n scored members the advantage is `n / (n - 1)` times `r - mean_g`.
    """

    def __init__(self, config: RlooConfig) -> None:
        self.config = config

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """rewards f32[N, K] (NaN: abstained), weights f32[K], group_ids i64[N] -> f32[N]."""
        centred = centre(rewards, weights, group_ids)
        counts = centred.counts[centred.groups]
        # A group of one has no signal: its deviation is 0, whatever the factor.
        return (centred.deviations * counts / (counts - 1).clamp(min=1)).float()
