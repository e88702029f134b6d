"""d of tokens and of completions: `d = (log pi_old - log mu) m`, and weights made of it.

Everything is computed in float64, since a completion's d is a sum of thousands of terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FINITE = 1e4
"""Stands for infinity in d: its exponential overflows float64, its sums do not, so that none is inf - inf."""
_LARGEST = 20.0
"""The largest weight is exp(20) = 4.9e8, as of the ratio of a loss: products with it do not overflow."""


def of_tokens(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """d of each token, 0 where it is masked or mu is not known (NaN).

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
    """`exp(d)` where kept, else 0."""
    return torch.where(keep, _exp(difference), 0.0).to(dtype)


def inside(difference: Tensor, low: float, high: float) -> Tensor:
    """Whether `low <= exp(d) <= high`: bool[B, T]."""
    ratio = difference.exp()
    return (ratio >= low) & (ratio <= high)


def _exp(difference: Tensor) -> Tensor:
    return difference.clamp(max=_LARGEST).exp()
