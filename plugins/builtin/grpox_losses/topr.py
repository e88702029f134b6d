"""TOPR: plain REINFORCE on good completions, importance weights of at most 1 on bad ones."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import ToprConfig


class Topr:
    """`-sg[a] A log pi`, `(1/N_seq) sum_i sum_t` (TOPR, arXiv 2503.14286).

    a is 1 where A > 0, and min(product of the completion's token ratios, 1) where A < 0. A good completion is
    learnt from like supervised data, however unlikely it has become; a bad one counts less as the policy leaves
    it, which bounds the loss without clipping. The sum over tokens is log pi of the whole completion, as in the
    paper. The loss is a surrogate: only its gradient has a meaning.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: ToprConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The surrogate of every token, f32[B, T]; ``topr/weight`` is a, 1 where the advantage is positive."""
        loss = self.expected_gradient(inputs) * inputs.logprobs
        return LossOutput(loss, {"topr/weight": _weight(inputs)})

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-a A`: f32[B, T]."""
        return -_weight(inputs) * inputs.advantages


def _weight(inputs: LossInputs) -> Tensor:
    """The weight a of every token, without gradient: f32[B, T]."""
    log_ratios = torch.where(inputs.token_mask, inputs.logprobs.detach() - inputs.old_logprobs, 0.0)
    tapered = log_ratios.sum(dim=-1, keepdim=True).clamp(max=0).exp()  # f32[B, 1], at most 1
    return torch.where(inputs.advantages < 0, tapered, 1.0)
