"""Components whose result depends on random numbers that the seed of the run, or of the call, does not fix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import numpy
import torch
from skeletons import ByGroup, Descent, SequenceMean, TokenMean, clipped_loss, ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction, Text, completion_text


class TokenDropout(TokenMean):
    """DAPO that drops a tenth of the tokens by torch's global numbers."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
        return LossOutput(torch.where(torch.rand_like(loss) < 0.1, 0.0, loss))


class NumpyNoise:
    """Policy gradient whose advantages get noise from numpy's global numbers."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        noise = torch.from_numpy(numpy.random.normal(0.0, 0.01, inputs.advantages.shape))
        return LossOutput(-ratio_of(inputs) * (inputs.advantages + noise.to(inputs.advantages)))


class FreshGenerator(SequenceMean):
    """GRPO that draws its clip range from a generator seeded by the system's clock."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        width = random.SystemRandom().uniform(0.1, 0.3)
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, width, width))


class TiesByChance(ByGroup):
    """Advantages by rank in the group that break ties by torch's global numbers."""

    least = 2

    def advantages(self, values: Tensor) -> Tensor:
        if values.max() == values.min():
            return 0 * values
        ranks = (values + 1e-9 * torch.rand_like(values)).argsort().argsort().double()
        return ranks / (len(values) - 1) - 0.5


class RandomPartner(ByGroup):
    """Baseline by the reward of one other completion of the group, drawn by Python's global numbers."""

    def advantages(self, values: Tensor) -> Tensor:
        return torch.stack([value - values[random.randrange(len(values))] for value in values])


class RejectionSampling:
    """Correction that keeps a token with probability min(1, pi_old / mu), by torch's global numbers."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
        keep = torch.rand_like(ratio) < ratio.clamp(max=1.0)
        return keep.to(old.dtype), keep


class HashOfText:
    """Reward by a stand-in judge that takes Python's hash of the text, which differs between processes."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
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


class LangevinUnseeded(Descent):
    """Gradient descent with noise from a generator that nothing seeds."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._generator.seed()

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        noise = torch.randn(parameter.shape, generator=self._generator).to(parameter)
        parameter.add_(parameter.grad + 0.01 * noise, alpha=-group["lr"])
