"""Masked importance sampling of tokens: `R = exp(d) if low <= exp(d) <= high else 0`."""

from __future__ import annotations

from torch import Tensor

from grpox_corrections.configs import TokenMaskConfig
from grpox_corrections.difference import inside, masked, of_tokens


class TokenMask:
    """Each token weighted by its ratio, or dropped where trainer and generator are too far apart.

    Such a token says more about the two implementations than about the policy (IcePop; Ring-1T report, arXiv
    2510.18855).
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
