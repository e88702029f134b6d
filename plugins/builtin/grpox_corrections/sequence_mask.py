"""Masked importance sampling of completions: `R = exp(sum_t d)` inside [low, high], else 0."""

from __future__ import annotations

from torch import Tensor

from grpox_corrections.configs import SequenceMaskConfig
from grpox_corrections.difference import inside, masked, of_sequences


class SequenceMask:
    """Each completion weighted by its ratio, or dropped whole where it is outside the bounds.

    Sequence-level MIS of Liu, Li et al. 2025, "When Speed Kills Stability".
    """

    def __init__(self, config: SequenceMaskConfig) -> None:
        self.config = config

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`exp(sum_t d)` at each token, before the mask; may be infinite: f64[B, T]."""
        return of_sequences(old, sampler, mask).exp()

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T] (0 where dropped), keep bool[B, T].

        Both are the same at all positions of a row. Tokens whose sampler log-probability is NaN add nothing.
        """
        difference = of_sequences(old, sampler, mask)
        keep = inside(difference, self.config.low, self.config.high)
        return masked(difference, keep, old.dtype), keep
