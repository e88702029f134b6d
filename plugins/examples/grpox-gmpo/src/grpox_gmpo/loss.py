"""GMPO: `-w_i A_i`, where `w_i` is the geometric mean of the clipped ratios of a sequence's tokens.

    w_i = (prod_t r[i,t])^(1/n_i) = exp((1/n_i) sum_t c[i,t])        r = pi / pi_old, clipped, and c = log r

    c[i,t] = min(log r, clip)     where A > 0
             max(log r, -clip)    where A < 0

Each token is clipped by itself, on the side that PPO clips: the one on which it has already moved as the
advantage asks.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from grpox.contracts import LossInputs, LossOutput, Reduction

from grpox_gmpo.config import GmpoLossConfig

LOG_RATIO_LIMIT = 20.0
"""Past it the ratio (4.9e8) heads for overflow, and an infinite one makes the gradient NaN."""


class GmpoLoss:
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673).

    GRPO averages the ratios of a sequence arithmetically, so that one token with a ratio of 100 outweighs a
    hundred others. The geometric mean averages their logarithms instead.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: GmpoLossConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The loss of every token, the same for all of one sequence: f32[B, T]."""
        clip = self.config.clip
        log_ratio = inputs.logprobs - inputs.old_logprobs  # f32[B, T]
        clipped = torch.where(inputs.advantages > 0, log_ratio.clamp(max=clip), log_ratio.clamp(min=-clip))
        counted = torch.where(inputs.token_mask, clipped, 0.0)
        tokens = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)  # i64[B, 1]
        mean = counted.sum(dim=1, keepdim=True) / tokens  # f32[B, 1]
        ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()  # f32[B, 1]
        loss = -ratio * inputs.advantages  # f32[B, T]
        was_clipped = (clipped != log_ratio).to(loss.dtype)
        return LossOutput(loss, {"clip_ratio/region": was_clipped, "gmpo/ratio": ratio.expand_as(loss)})
