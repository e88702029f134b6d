"""R of every token of one completion, for d = log pi_old - log mu; floats, since R has no gradient."""

from __future__ import annotations

import math

from .completion import Completion


def gaps(completion: Completion) -> list[float]:
    """d of each token; 0 where mu is not known."""
    return [0.0 if math.isnan(token.sampler) else token.old - token.sampler for token in completion]


def none(completion: Completion) -> list[float]:
    """1"""
    return [1.0 for _ in completion]


def token_truncate(completion: Completion, cap: float = 2.0) -> list[float]:
    """min(exp(d_t), cap): truncated importance sampling."""
    return [min(math.exp(d), cap) for d in gaps(completion)]


def token_mask(completion: Completion, low: float = 0.5, high: float = 5.0) -> list[float]:
    """exp(d_t) if low <= exp(d_t) <= high, else 0: IcePop."""
    return [math.exp(d) if low <= math.exp(d) <= high else 0.0 for d in gaps(completion)]


def sequence_truncate(completion: Completion, cap: float = 2.0) -> list[float]:
    """min(exp(sum d), cap), the same at each token."""
    return [min(math.exp(sum(gaps(completion))), cap) for _ in completion]


def sequence_mask(completion: Completion, low: float = 0.0, high: float = 3.0) -> list[float]:
    """exp(sum d) if low <= exp(sum d) <= high, else 0, the same at each token."""
    ratio = math.exp(sum(gaps(completion)))
    return [ratio if low <= ratio <= high else 0.0 for _ in completion]


def geometric_mask(completion: Completion, low: float = 0.999, high: float = 1.001) -> list[float]:
    """exp(d_t) if low <= exp(sum d / |o|) <= high, else 0."""
    if not completion:
        return []
    mean = math.exp(sum(gaps(completion)) / len(completion))
    return [math.exp(d) if low <= mean <= high else 0.0 for d in gaps(completion)]
