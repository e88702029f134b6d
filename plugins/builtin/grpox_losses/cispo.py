"""CISPO: `-sg[min(w, cap)] A log pi`, `sum_i,t / N_tok`."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import CispoConfig
from grpox_losses.ratio import token_ratio


class Cispo:
    """Policy gradient with a capped, detached ratio as its weight (MiniMax-M1, arXiv 2506.13585).

    Clipping takes the gradient of a token away; a cap on the weight only bounds it, so that rare tokens which
    start a line of reasoning go on learning. The loss is a surrogate: only its gradient has a meaning.
    """

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: CispoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The surrogate of every token, f32[B, T]; ``clip_ratio/cap`` is 1 where w > cap and A > 0."""
        loss = self.expected_gradient(inputs) * inputs.logprobs
        capped = (token_ratio(inputs) > self.config.cap) & (inputs.advantages > 0)
        return LossOutput(loss, {"clip_ratio/cap": capped.to(loss.dtype)})

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-min(w, cap) A`: f32[B, T]."""
        weight = token_ratio(inputs).detach().clamp(max=self.config.cap)
        return -weight * inputs.advantages
