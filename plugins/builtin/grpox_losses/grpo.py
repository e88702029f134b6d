"""GRPO: the clipped surrogate, `(1/N_seq) sum_i (1/n_i) sum_t`."""

from __future__ import annotations

from typing import ClassVar

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import ClippedConfig
from grpox_losses.ratio import clipped_surrogate


class Grpo:
    """Every sequence counts the same, however long (DeepSeekMath, arXiv 2402.03300, eq. 3).

    A token of a short sequence therefore weighs more than one of a long sequence. With `level: sequence`
    this is GSPO (arXiv 2507.18071, eq. 5).
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: ClippedConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The clipped surrogate of every token: f32[B, T]."""
        return clipped_surrogate(inputs, self.config)
