"""DAPO: the clipped surrogate, `sum_i,t / N_tok`."""

from __future__ import annotations

from typing import ClassVar

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import ClippedConfig
from grpox_losses.ratio import clipped_surrogate


class Dapo:
    """Every token of the optimizer step counts the same (DAPO, arXiv 2503.14476, eq. 8).

    The paper clips higher than lower, `clip_high: 0.28`.
    """

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: ClippedConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The clipped surrogate of every token: f32[B, T]."""
        return clipped_surrogate(inputs, self.config)
