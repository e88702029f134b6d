"""Geometric rejection: `R = exp(d_t)` if `low <= exp((1/n) sum_t d) <= high`, else 0."""

from __future__ import annotations

from torch import Tensor

from grpox_corrections.configs import GeometricMaskConfig
from grpox_corrections.difference import inside, masked, of_sequence_means, of_tokens


class GeometricMask:
    """A completion is kept if the geometric mean of its tokens' ratios is near 1; tokens have own weights.

    Geo-RS of verl's rollout correction, which only rejects; here the tokens of what is kept are weighted too.
    """

    weighs_by_raw = False

    def __init__(self, config: GeometricMaskConfig) -> None:
        self.config = config

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`exp((1/n) sum_t d)` at each token, which the bounds are for; may be infinite: f64[B, T]."""
        return of_sequence_means(old, sampler, mask).exp()

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T] (0 where dropped), keep bool[B, T].

        keep is the same at all positions of a row. A token whose sampler log-probability is NaN has d = 0 and
        counts in n. Weights end at exp(20): nothing else bounds those of single tokens.
        """
        keep = inside(of_sequence_means(old, sampler, mask), self.config.low, self.config.high)
        return masked(of_tokens(old, sampler, mask), keep, old.dtype), keep
