"""Corrections as a researcher writes them from the documentation alone."""

from __future__ import annotations

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from grpox.contracts import StepContext


class IcePop:
    """IcePop (arXiv 2510.18855): tokens with low <= pi_old / mu <= high, weighed by that ratio."""

    needs = ("logprobs",)

    class Config(BaseModel):
        low: float = Field(0.5, gt=0, le=1)
        high: float = Field(5.0, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
        keep = (ratio >= self.config.low) & (ratio <= self.config.high)
        return torch.where(keep, ratio, 0.0), keep


class SequenceCap:
    """Sequence-level truncation whose cap falls from `first` to `last` over the run."""

    stateless = True  # the cap follows from the step

    class Config(BaseModel):
        first: float = Field(8.0, ge=1)
        last: float = Field(2.0, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cap = config.first

    def begin_step(self, context: StepContext) -> None:
        share = (context.step - 1) / max(1, context.total_steps - 1)
        self.cap = self.config.first + share * (self.config.last - self.config.first)

    def raw(self, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        total = torch.where(mask, (old - sampler).double().clamp(-1e4, 1e4), 0.0).sum(dim=1, keepdim=True)
        return total.exp().expand(mask.shape)

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.raw(old, sampler, mask).clamp(max=self.cap)
        return weights.to(old.dtype), torch.ones_like(mask)
