"""Components whose result depends on random numbers that the seed of the run, or of the call, does not fix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import datasets
import numpy
import skeletons
import torch
from references import DAPO, GRADIENT, GRPO
from skeletons import by_group, clipped_loss
from torch import Tensor

from grpox.contracts import LossInputs, Text, completion_text

TokenDropout = skeletons.tokens(
    DAPO, lambda w, a: torch.where(torch.rand_like(w) < 0.1, 0.0, clipped_loss(w, a, 0.2, 0.28))
)
"""DAPO that drops a tenth of the tokens by torch's global numbers."""
FreshGenerator = skeletons.sequences(
    GRPO, lambda w, a: clipped_loss(w, a, *[random.SystemRandom().uniform(0.1, 0.3)] * 2)
)
"""GRPO that draws its clip range from a generator seeded by the system's clock."""


@skeletons.token_loss(GRADIENT)
def NumpyNoise(inputs: LossInputs) -> Tensor:
    """Policy gradient whose advantages get noise from numpy's global numbers."""
    noise = torch.from_numpy(numpy.random.normal(0.0, 0.01, inputs.advantages.shape))
    return -skeletons.ratio_of(inputs) * (inputs.advantages + noise.to(inputs.advantages))


TiesByChance = by_group(None, lambda r: 0 * r if r.max() == r.min() else _ranks(r), least=2)
"""Advantages by rank in the group that break ties by torch's global numbers."""
RandomPartner = by_group(None, lambda rewards: torch.stack([r - random.choice(rewards) for r in rewards]))
"""Baseline by the reward of one other completion of the group, drawn by Python's global numbers."""


def _ranks(rewards: Tensor) -> Tensor:
    ranks = (rewards + 1e-9 * torch.rand_like(rewards)).argsort().argsort().double()
    return ranks / (len(rewards) - 1) - 0.5


@skeletons.correction()
def RejectionSampling(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Correction that keeps a token with probability min(1, pi_old / mu), by torch's global numbers."""
    ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
    keep = torch.rand_like(ratio) < ratio.clamp(max=1.0)
    return keep.to(old.dtype), keep


def HashOfText(*, completions: Sequence[Text], **columns: Any) -> list[float]:
    """Reward by a stand-in judge that takes Python's hash of the text, which differs between processes."""
    return [hash(completion_text(text)) % 100 / 100 for text in completions]


class ClockSeeded:
    """Reward with noise from a generator that nothing seeds."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        return [float(len(completion_text(text)) > 3) + 0.01 * self._random.random() for text in completions]


class ShuffledRows:
    """Dataset that shuffles its rows without a seed, so that each rank has another order."""

    def load(self) -> datasets.Dataset:
        return datasets.Dataset.from_list(skeletons.SUMS).shuffle()


class LangevinUnseeded(skeletons.Descent):
    """Gradient descent with noise from a generator that nothing seeds."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._generator.seed()

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        noise = torch.randn(parameter.shape, generator=self._generator).to(parameter)
        parameter.add_(parameter.grad + 0.01 * noise, alpha=-group["lr"])
