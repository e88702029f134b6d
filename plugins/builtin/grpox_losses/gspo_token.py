"""GSPO-token: clipped by the sequence's ratio, with a gradient and an advantage for each token of its own."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import GspoTokenConfig
from grpox_losses.losses import clip_ratios, sequence_ratio


class GspoToken:
    """`-min(s A_t, clip(s, 1-clip_low, 1+clip_high) A_t)`, `s = sg[w_i] pi/sg[pi]` (arXiv 2507.18071, 4.3).

    s has the value of the sequence's ratio, and a gradient through its own token alone. Where all tokens of a
    sequence have one advantage, the gradient is that of GSPO (`grpo` with `level: sequence`); tokens of
    different turns may have different advantages. The loss is a surrogate: its value depends on all tokens.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True
    hyperparameters: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def __init__(self, config: GspoTokenConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of every token.

        Returns:
            loss f32[B, T], and the diagnostics of `clip_ratios`.
        """
        own = (inputs.logprobs - inputs.logprobs.detach()).exp()  # f32[B, T]: 1, with the token's gradient
        ratio = sequence_ratio(inputs).detach() * own
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        loss = -torch.min(ratio * inputs.advantages, clipped * inputs.advantages)
        return LossOutput(loss, clip_ratios(*self._clipped(inputs), inputs, "sequence"))

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-w_i A_t`, or 0: f32[B, T]."""
        low, high = self._clipped(inputs)
        slope = -sequence_ratio(inputs).detach() * inputs.advantages
        return slope.masked_fill(low | high, 0.0)

    def _clipped(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Tokens whose gradient the lower and the upper clip removed: bool[B, T] each."""
        ratio = sequence_ratio(inputs).detach()
        low = (ratio < 1 - self.config.clip_low) & (inputs.advantages < 0)
        return low, (ratio > 1 + self.config.clip_high) & (inputs.advantages > 0)
