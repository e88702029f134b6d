"""LUSPO: `-min(w_i A, clip(w_i, 1-clip_low, 1+clip_high) A)`, summed over the tokens of each sequence."""

from __future__ import annotations

from typing import ClassVar

import torch

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_example_loss.config import LuspoConfig


class Luspo:
    """Length-unbiased sequence policy optimization.

    GSPO takes one ratio per sequence, the geometric mean of its tokens' ratios, whose gradient is spread over
    the tokens: each gets 1/length of it. Summing over tokens undoes that, so that a token weighs the same in
    a short sequence as in a long one.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: LuspoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The loss of each token, the same for all of one sequence: f32[B, T]."""
        lengths = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)  # i64[B, 1]
        log_ratio = (inputs.logprobs - inputs.old_logprobs) * inputs.token_mask  # f32[B, T]
        ratio = torch.exp(log_ratio.sum(dim=1, keepdim=True) / lengths)  # f32[B, 1]
        lower, upper = 1 - self.config.clip_low, 1 + self.config.clip_high
        loss = -torch.min(ratio * inputs.advantages, ratio.clamp(lower, upper) * inputs.advantages)
        outside = ((ratio < lower) | (ratio > upper)).expand_as(loss)
        return LossOutput(loss, {"clip_ratio/outside": outside.to(loss.dtype)})
