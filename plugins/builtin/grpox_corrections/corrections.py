"""The built-in corrections: the weight R of each token, computed from d = (log pi_old - log mu) m.

Everything is computed in float64, because a completion's d is a sum of thousands of terms. Every `correct`
takes old and sampler f32[B, T] and mask bool[B, T], and returns weights f32[B, T], 0 for dropped tokens, and
keep bool[B, T]. A correction of whole completions returns the same weight and keep at all positions of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpox_corrections.configs import (
    GeometricMaskConfig,
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


def inside(difference: Tensor, config: TokenMaskConfig | SequenceMaskConfig | GeometricMaskConfig) -> Tensor:
    """Test `low <= exp(d) <= high` for each token: bool[B, T]."""
    ratio = difference.exp()
    return (ratio >= config.low) & (ratio <= config.high)


def _exp(difference: Tensor) -> Tensor:
    return difference.clamp(max=_LARGEST).exp()


class NoCorrection:
    """`R = 1` for any log-probabilities of the generator."""

    weighs_by_raw = False
    corrects = False

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh every token by 1."""
        return torch.ones_like(old), torch.ones_like(mask)


class TokenTruncate:
    """Each token weighted by the ratio of its probabilities under trainer and generator, up to a cap.

    `R = min(exp(d), cap)`. Truncation bounds the variance and drops no token (Yao et al. 2025).
    """

    def __init__(self, config: TokenTruncateConfig | SequenceTruncateConfig) -> None:
        self.config = config

    def difference(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """d of each token: f64[B, T]."""
        return of_tokens(old, sampler, mask)

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Keep all tokens; masked ones, and those whose sampler log-probability is NaN, have d = 0."""
        weights = _exp(self.difference(old, sampler, mask)).clamp(max=self.config.cap)
        return weights.to(old.dtype), torch.ones_like(mask)


class TokenMask:
    """Each token weighted by its ratio, or dropped if trainer and generator differ too much.

    `R = exp(d)` if `low <= exp(d) <= high`, else 0. A ratio outside the bounds shows a difference between the
    implementations rather than between policies (IcePop; Ring-1T report, arXiv 2510.18855).
    """

    def __init__(self, config: TokenMaskConfig | SequenceMaskConfig) -> None:
        self.config = config

    def difference(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """d of each token: f64[B, T]."""
        return of_tokens(old, sampler, mask)

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Drop tokens out of bounds; masked tokens, and those without a sampler log-probability, have d = 0."""
        difference = self.difference(old, sampler, mask)
        keep = inside(difference, self.config)
        return torch.where(keep, _exp(difference), 0.0).to(old.dtype), keep


class _OfSequences:
    """Whole completions are corrected: all positions of a row have one d, so one weight and one keep."""

    def difference(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`sum_t d` at each token: f64[B, T]."""
        return of_sequences(old, sampler, mask)

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`exp(sum_t d)` at each token, before any cap or mask; may be infinite: f64[B, T]."""
        return of_sequences(old, sampler, mask).exp()


class SequenceTruncate(_OfSequences, TokenTruncate):
    """Each completion weighted by its probability under the trainer over that under the generator, up to a cap.

    `R = min(exp(sum_t d), cap)`. Without the cap this weight is unbiased, unlike weights of single tokens, but
    its variance grows with length.
    """


class SequenceMask(_OfSequences, TokenMask):
    """Each completion weighted by its ratio, or dropped whole if the ratio is outside the bounds.

    `R = exp(sum_t d)` inside [low, high], else 0. Sequence-level MIS of Liu, Li et al. 2025, "When Speed Kills
    Stability".
    """


class GeometricMask:
    """Completions kept if the geometric mean of their tokens' ratios is near 1; each token has its own weight.

    `R = exp(d_t)` if `low <= exp((1/n) sum_t d) <= high`, else 0. Geo-RS of verl's rollout correction, which
    only rejects completions; here the tokens of kept completions are also weighted.
    """

    weighs_by_raw = False

    def __init__(self, config: GeometricMaskConfig) -> None:
        self.config = config

    def _mean(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`(1/n) sum_t d`, n the tokens of the completion, at least 1: f64[B, T]."""
        return of_sequences(old, sampler, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        """`exp((1/n) sum_t d)` at each token, which the bounds are for; may be infinite: f64[B, T]."""
        return self._mean(old, sampler, mask).exp()

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Drop completions out of bounds. A token whose sampler log-probability is NaN has d = 0, counts in n.

        Weights are capped at exp(20), because nothing else bounds the weights of single tokens.
        """
        keep = inside(self._mean(old, sampler, mask), self.config)
        return torch.where(keep, _exp(of_tokens(old, sampler, mask)), 0.0).to(old.dtype), keep
