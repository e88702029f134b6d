"""BNPO: the clipped surrogate, mean over micro-batches of `sum_i,t / n_tok`."""

from __future__ import annotations

from typing import ClassVar

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_losses.configs import ClippedConfig
from grpox_losses.ratio import clipped_surrogate


class Bnpo:
    """Every token of a micro-batch counts the same (TRL's `loss_type: bnpo`).

    Its gradient depends on the micro-batch size by definition; with one sequence per micro-batch it is grpo.
    """

    reduction: ClassVar[Reduction] = Reduction.LOCAL_TOKEN_MEAN
    zero_at_zero_advantage: ClassVar[bool] = True

    def __init__(self, config: ClippedConfig) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The clipped surrogate of every token: f32[B, T]."""
        return clipped_surrogate(inputs, self.config)
