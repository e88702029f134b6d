"""Components whose result depends on random numbers that the seed of the run, or of the call, does not fix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import datasets
import numpy
import skeletons
import torch
from skeletons import clipped_loss, ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, Reduction, Text, completion_text


@skeletons.token_mean
def TokenDropout(inputs: LossInputs) -> Tensor:
    """DAPO that drops a tenth of the tokens by torch's global numbers."""
    loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
    return torch.where(torch.rand_like(loss) < 0.1, 0.0, loss)


@skeletons.loss(Reduction.TOKEN_MEAN)
def NumpyNoise(inputs: LossInputs) -> Tensor:
    """Policy gradient whose advantages get noise from numpy's global numbers."""
    noise = torch.from_numpy(numpy.random.normal(0.0, 0.01, inputs.advantages.shape))
    return -ratio_of(inputs) * (inputs.advantages + noise.to(inputs.advantages))


@skeletons.sequence_mean
def FreshGenerator(inputs: LossInputs) -> Tensor:
    """GRPO that draws its clip range from a generator seeded by the system's clock."""
    width = random.SystemRandom().uniform(0.1, 0.3)
    return clipped_loss(ratio_of(inputs), inputs.advantages, width, width)


@skeletons.by_group(2)
def TiesByChance(values: Tensor) -> Tensor:
    """Advantages by rank in the group that break ties by torch's global numbers."""
    if values.max() == values.min():
        return 0 * values
    ranks = (values + 1e-9 * torch.rand_like(values)).argsort().argsort().double()
    return ranks / (len(values) - 1) - 0.5


@skeletons.by_group()
def RandomPartner(values: Tensor) -> Tensor:
    """Baseline by the reward of one other completion of the group, drawn by Python's global numbers."""
    return torch.stack([value - values[random.randrange(len(values))] for value in values])


@skeletons.correction
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
        rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 33)]
        return datasets.Dataset.from_list(rows).shuffle()


class LangevinUnseeded(skeletons.Descent):
    """Gradient descent with noise from a generator that nothing seeds."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._generator.seed()

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        noise = torch.randn(parameter.shape, generator=self._generator).to(parameter)
        parameter.add_(parameter.grad + 0.01 * noise, alpha=-group["lr"])
