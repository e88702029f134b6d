"""VESPO: the policy gradient of each sequence, weighted by a soft function of its whole importance weight.

    loss[i,t] = -sg[phi(W_i)] A_i log pi[i,t]          sg: no gradient flows through

    phi(W) = W^k exp(lambda (1 - W))                   1 where W = 1; (k, lambda) by the sign of A
    W_i = prod_t (pi / pi_old) R  =  prod_t pi / mu    mu: the distribution that was sampled from

phi grows from 0 to its largest value at W = k/lambda and falls again. So a sequence fades that the policy would
no longer write (W small), or would write far more often than it was sampled (W large); nothing is clipped.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from grpox.contracts import LossInputs, LossOutput, Reduction
from torch import Tensor

from grpox_vespo.config import VespoLossConfig

LOWEST, HIGHEST = math.log(1e-8), 20.0
"""Bounds of log R and log W, those of TRL: at both ends phi is next to 0. Log-ratios are bounded by 20 too."""


class VespoLoss:
    """Variational sequence-level soft policy optimization (arXiv 2602.10693).

    The weight of a sequence is the product over its tokens, not their mean: exact for the reward of a whole
    completion. What separates the generator from the trainer (R) and what the updates since sampling changed
    (pi / pi_old) go into the same product, so that one function bounds both. That is why the loss takes the
    correction's weights itself, and why they have to be those of single tokens.
    """

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    gradient: ClassVar[Literal["value", "surrogate"]] = "surrogate"
    zero_at_zero_advantage: ClassVar[bool] = True
    folds_correction: ClassVar[bool] = True

    def __init__(self, config: VespoLossConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The surrogate of every token, f32[B, T]: only its gradient has a meaning."""
        log_weight = self._log_weight(inputs)
        phi = self._phi(log_weight, inputs.advantages)
        loss = -phi * inputs.advantages * inputs.logprobs
        return LossOutput(loss, {"vespo/phi": phi, "vespo/log_weight": log_weight.expand_as(loss)})

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        """The derivative of each token's loss by its log-probability, `-phi A`: f32[B, T]."""
        return -self._phi(self._log_weight(inputs), inputs.advantages) * inputs.advantages

    @torch.no_grad()
    def _log_weight(self, inputs: LossInputs) -> Tensor:
        """log W of every sequence: f32[B, 1]."""
        log_weights = (inputs.logprobs - inputs.old_logprobs).clamp(-HIGHEST, HIGHEST)  # f32[B, T]
        if inputs.correction_weights is not None:
            # R is 0 where a correction drops the token; as 1e-8 it leaves the sequence next to nothing.
            log_weights = log_weights + inputs.correction_weights.log().clamp(LOWEST, HIGHEST)
        counted = torch.where(inputs.token_mask, log_weights, 0.0)
        return counted.sum(dim=1, keepdim=True).clamp(LOWEST, HIGHEST)

    @torch.no_grad()
    def _phi(self, log_weight: Tensor, advantages: Tensor) -> Tensor:
        """phi at every token: log_weight f32[B, 1], advantages f32[B, T] -> f32[B, T]."""
        config = self.config
        positive = config.k_pos * log_weight + config.lambda_pos * (1 - log_weight.exp())  # f32[B, 1]
        negative = config.k_neg * log_weight + config.lambda_neg * (1 - log_weight.exp())
        return torch.where(advantages >= 0, positive, negative).exp()
