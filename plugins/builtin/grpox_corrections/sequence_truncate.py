"""Truncated importance sampling of completions: `R = min(exp(sum_t d), cap)` at each of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from grpox_corrections.configs import SequenceTruncateConfig
from grpox_corrections.difference import of_sequences, truncated


class SequenceTruncate:
    """Each completion weighted by its probability under the trainer over that under the generator, up to a cap.

    Without the cap this weight is unbiased, which that of single tokens is not; its spread grows with length.
    """

    def __init__(self, config: SequenceTruncateConfig) -> None:
        self.config = config

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`exp(sum_t d)` at each token, before the cap; may be infinite: f64[B, T]."""
        return of_sequences(old, sampler, mask).exp()

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T] (all True).

        A weight stands at all positions of its row. Tokens whose sampler log-probability is NaN add nothing.
        """
        difference = of_sequences(old, sampler, mask)
        return truncated(difference, self.config.cap, old.dtype), torch.ones_like(mask)
