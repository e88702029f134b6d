"""A completion as the papers have it: o_i = (o_i,1, ..., o_i,|o_i|), without padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Token:
    """One token that the model wrote."""

    logprob: Tensor
    """log pi: float64, one number, and the only thing here with a gradient."""
    old: float
    """log pi_old"""
    advantage: float
    sampler: float = math.nan
    """log mu; NaN where the generator told none."""
    ref: float = math.nan
    """log ref; NaN in a step without a reference."""
    entropy: float = math.nan
    """H of the distribution that it was drawn from; NaN where none was told."""


Completion = list[Token]
