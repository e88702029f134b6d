"""SAPO: `-A (4/tau) sigmoid(tau (w-1))`, tau by the sign of A, `(1/N_seq) sum_i (1/n_i) sum_t`."""

from __future__ import annotations

from typing import ClassVar

import torch

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import SapoConfig
from grpox_losses.ratio import token_ratio


class Sapo:
    """A soft gate in place of clipping: the gradient fades as the ratio leaves 1 (arXiv 2511.20347).

    At w = 1 the value is -2A/tau and the slope in w is -A, that of the unclipped surrogate.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: SapoConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The gated loss of every token, f32[B, T]; ``sapo/gate`` is the slope left, 1 at w = 1."""
        advantages = inputs.advantages
        tau = torch.full_like(advantages, self.config.tau_neg)
        tau = tau.masked_fill(advantages > 0, self.config.tau_pos)
        gate = torch.sigmoid(tau * (token_ratio(inputs) - 1))  # f32[B, T]
        slope = 4 * gate * (1 - gate)
        return LossOutput(-advantages * 4 / tau * gate, {"sapo/gate": slope.detach()})
