"""Parameters of the built-in advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpox.config import Parameters


class ScaledConfig(Parameters):
    """Parameters of batch and reinforce_plus_plus; group, quantile, gigpo and return-to-go have them too."""

    eps: float = Field(1e-4, ge=0)
    """Number added to every standard deviation, at least 0; 1e-4 as in TRL."""
    ddof: Literal[0, 1] = 1
    """Divisor n - ddof of the sum of squares: 1 for the sample standard deviation, as in TRL, or 0."""


class GroupConfig(ScaledConfig):
    """Parameters of group."""

    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order of steps with several reward functions. sum_then_normalize, as in TRL, scales the weighted sum;
    normalize_then_sum scales each function within the group, sums them by weight and divides by the standard
    deviation over the batch (GDPO, arXiv 2601.05242)."""


class QuantileConfig(ScaledConfig):
    """Parameters of quantile."""

    q: float = Field(0.4, gt=0, lt=1)
    """Quantile of the group's rewards that is the baseline; 0.4 by default in the QAE paper (arXiv 2509.22611),
    and 0.6 if the entropy collapses early. With a larger q, more groups punish their failures and fewer reward
    their successes."""


class ReturnToGoConfig(ScaledConfig):
    """Parameters of return-to-go; gigpo has them too."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of the rewards of each later turn. Below 1, an early success counts more than a late one."""
    norm: Literal["std", "fixed"] = "std"
    """Divisor: std, the standard deviation plus eps, or fixed, which is 1."""


class GigpoConfig(ReturnToGoConfig):
    """Parameters of gigpo."""

    gamma: float = Field(0.95, ge=0, le=1)
    """Discount of the rewards of each later turn, for the comparison of turns; 0.95 as in the paper."""
    omega: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Weight of the comparison of turns, beside that of episodes; 1 as in the paper."""
