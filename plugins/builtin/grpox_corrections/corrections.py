"""The built-in corrections: the weight R of each token, computed from d = (log pi_old - log mu) m.

Everything is computed in float64, because a completion's d is a sum of thousands of terms. Every `correct`
takes old and sampler f32[B, T] and mask bool[B, T], and returns weights f32[B, T], 0 for dropped tokens, and
keep bool[B, T]. If it corrects whole completions, both are the same at all positions of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpox_corrections.configs import (
    GeometricMaskConfig,
    NoCorrectionConfig,
    SequenceMaskConfig,
    SequenceTruncateConfig,
    TokenMaskConfig,
    TokenTruncateConfig,
)

_FINITE = 1e4
"""Value for infinity in d: its exponential overflows float64 but its sums do not, so inf - inf cannot occur."""
_LARGEST = 20.0
"""Largest log weight: exp(20) = 4.9e8, as for the ratio of a loss, so that products do not overflow."""


def of_tokens(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """Compute d of each token; 0 if the token is masked or mu is unknown (NaN).

    Args:
        old: f32[B, T], log pi_old.
        sampler: f32[B, T], log mu.
        mask: bool[B, T].

    Returns:
        f64[B, T] without gradient.
    """
    known = mask & ~sampler.isnan()
    difference = old.detach().double() - sampler.detach().double()
    return torch.where(known, difference, 0.0).clamp(-_FINITE, _FINITE)


def of_sequences(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """`sum_t d`, the same at every position of a completion: f64[B, T]."""
    return of_tokens(old, sampler, mask).sum(dim=1, keepdim=True).expand(mask.shape)


def of_sequence_means(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """`(1/n) sum_t d`, n the tokens of the completion, at least 1: f64[B, T]."""
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return of_sequences(old, sampler, mask) / tokens


def truncated(difference: Tensor, cap: float, dtype: torch.dtype) -> Tensor:
    """`min(exp(d), cap)`"""
    return _exp(difference).clamp(max=cap).to(dtype)


def masked(difference: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """`exp(d)` for kept tokens, else 0."""
    return torch.where(keep, _exp(difference), 0.0).to(dtype)


def inside(difference: Tensor, low: float, high: float) -> Tensor:
    """Test `low <= exp(d) <= high` for each token: bool[B, T]."""
    ratio = difference.exp()
    return (ratio >= low) & (ratio <= high)


def _exp(difference: Tensor) -> Tensor:
    return difference.clamp(max=_LARGEST).exp()


class NoCorrection:
    """`R = 1` for any log-probabilities of the generator."""

    weighs_by_raw = False
    corrects = False

    def __init__(self, config: NoCorrectionConfig) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T]."""
        return torch.ones_like(old), torch.ones_like(mask)


class TokenTruncate:
    """Each token weighted by the ratio of its probabilities under trainer and generator, up to a cap.

    `R = min(exp(d), cap)`. Truncation bounds the variance and drops no token (Yao et al. 2025).
    """

    def __init__(self, config: TokenTruncateConfig) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T] (all True).

        Masked tokens, and those whose sampler log-probability is NaN, weigh 1.
        """
        difference = of_tokens(old, sampler, mask)
        return truncated(difference, self.config.cap, old.dtype), torch.ones_like(mask)


class TokenMask:
    """Each token weighted by its ratio, or dropped if trainer and generator differ too much.

    `R = exp(d)` if `low <= exp(d) <= high`, else 0. A ratio outside the bounds shows a difference between the
    implementations rather than between policies (IcePop; Ring-1T report, arXiv 2510.18855).
    """

    def __init__(self, config: TokenMaskConfig) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T] (0 where dropped), keep bool[B, T].

        Masked tokens, and those whose sampler log-probability is NaN, are kept and weigh 1.
        """
        difference = of_tokens(old, sampler, mask)
        keep = inside(difference, self.config.low, self.config.high)
        return masked(difference, keep, old.dtype), keep


class SequenceTruncate:
    """Each completion weighted by its probability under the trainer over that under the generator, up to a cap.

    `R = min(exp(sum_t d), cap)`. Without the cap this weight is unbiased, unlike weights of single tokens, but
    its variance grows with length.
    """

    def __init__(self, config: SequenceTruncateConfig) -> None:
        self.config = config

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`exp(sum_t d)` at each token, before the cap; may be infinite: f64[B, T]."""
        return of_sequences(old, sampler, mask).exp()

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """old, sampler f32[B, T], mask bool[B, T] -> weights f32[B, T], keep bool[B, T] (all True).

        All positions of a row have the same weight. Tokens whose sampler log-probability is NaN add nothing.
        """
        difference = of_sequences(old, sampler, mask)
        return truncated(difference, self.config.cap, old.dtype), torch.ones_like(mask)


class SequenceMask:
    """Each completion weighted by its ratio, or dropped whole if the ratio is outside the bounds.

    `R = exp(sum_t d)` inside [low, high], else 0. Sequence-level MIS of Liu, Li et al. 2025, "When Speed Kills
    Stability".
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


class GeometricMask:
    """Completions kept if the geometric mean of their tokens' ratios is near 1; each token has its own weight.

    `R = exp(d_t)` if `low <= exp((1/n) sum_t d) <= high`, else 0. Geo-RS of verl's rollout correction, which
    only rejects completions; here the tokens of kept completions are also weighted.
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
        counts in n. Weights are capped at exp(20), because nothing else bounds the weights of single tokens.
        """
        keep = inside(of_sequence_means(old, sampler, mask), self.config.low, self.config.high)
        return masked(of_tokens(old, sampler, mask), keep, old.dtype), keep
