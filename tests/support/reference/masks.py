"""Masks of the policy term: completions that are off-policy, tokens of low entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .completion import Completion


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between the two values around it, as numpy's; of nothing -inf."""
    if not values:
        return -math.inf
    in_order = sorted(values)
    place = q * (len(in_order) - 1)
    below = math.floor(place)
    above = min(below + 1, len(in_order) - 1)
    return in_order[below] + (place - below) * (in_order[above] - in_order[below])


def top_entropy(terms: list[Tensor], completion: Completion, least: float) -> list[Tensor]:
    """0 for a token of less entropy (arXiv 2506.01939)."""
    return [t if token.entropy >= least else 0 * t for t, token in zip(terms, completion, strict=True)]


def off_policy(terms: list[Tensor], completion: Completion, threshold: float) -> list[Tensor]:
    """0 where A < 0, of a completion with 1/|o| sum log(mu/pi) > threshold (arXiv 2512.02556, eq. 9)."""
    apart = 0.0
    for token in completion:
        apart += 0.0 if math.isnan(token.sampler) else token.sampler - token.logprob.item()
    far = bool(completion) and apart / len(completion) > threshold
    return [0 * t if far and token.advantage < 0 else t for t, token in zip(terms, completion, strict=True)]
