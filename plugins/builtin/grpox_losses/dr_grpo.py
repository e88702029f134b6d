"""Dr. GRPO: the clipped surrogate, `sum_i,t / (N_seq * max_completion_length)`."""

from __future__ import annotations

from typing import ClassVar

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import ClippedConfig
from grpox_losses.ratio import clipped_surrogate


class DrGrpo:
    """Every token counts the same, in every batch: the divisor is a constant (arXiv 2503.20783).

    The paper pairs it with advantages that are not divided by their standard deviation (`advantage: none`).
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM_BY_MAX_LENGTH
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: ClippedConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The clipped surrogate of every token: f32[B, T]."""
        return clipped_surrogate(inputs, self.config)
