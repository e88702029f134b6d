"""Parameters of the built-in advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpox.config import Parameters


class ScaledConfig(Parameters):
    """The parameters of batch and reinforce_plus_plus, which group and quantile have too."""

    eps: float = Field(1e-4, ge=0)
    """Added to every standard deviation, at least 0; 1e-4 as in TRL."""
    ddof: Literal[0, 1] = 1
    """Sums of squares are divided by n - ddof: 1 for the sample's standard deviation, as in TRL, or 0."""


class GroupConfig(ScaledConfig):
    """The parameters of group."""

    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """What comes first where there are several reward functions: sum_then_normalize, as in TRL, scales their
    weighted sum; normalize_then_sum scales each function within the group, adds them up by weight and divides
    by the standard deviation over the batch (GDPO, arXiv 2601.05242)."""


class CentredConfig(Parameters):
    """none has no parameters."""


class RlooConfig(Parameters):
    """rloo has no parameters."""


class MaxRlConfig(Parameters):
    """maxrl has no parameters."""


class OpoConfig(Parameters):
    """opo has no parameters."""


class QuantileConfig(ScaledConfig):
    """The parameters of quantile."""

    q: float = Field(0.4, gt=0, lt=1)
    """Share of the group's rewards that the baseline is not below; 0.4 in the QAE paper (arXiv 2509.22611). A
    smaller q turns more groups into groups whose failures are punished."""
