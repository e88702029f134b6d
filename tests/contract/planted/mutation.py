"""Components that change what they are given, which the run goes on with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import references as paper
import skeletons
import torch
from references import DAPO, GRADIENT, GRPO, ICEPOP, TIS
from skeletons import clipped_loss, gradient_loss, ratio_of, sequence_mean, token_mean
from torch import Tensor

from grpox.contracts import LossInputs, WeightStream

ClampsAdvantages = skeletons.tokens(DAPO, lambda w, a: clipped_loss(w, a.clamp_(-1.0, 1.0), 0.2, 0.28))
"""DAPO that clamps the advantages in place."""


@sequence_mean(GRPO)
def SubtractsFromOld(inputs: LossInputs) -> Tensor:
    """GRPO that forms the log-ratio in the memory of the old log-probabilities."""
    ratio = (inputs.logprobs + inputs.old_logprobs.neg_()).clamp(-20, 20).exp()
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.2)


@token_mean(GRADIENT)
def NarrowsTheMask(inputs: LossInputs) -> Tensor:
    """Policy gradient that takes tokens of a large ratio out of the mask that it is given."""
    inputs.token_mask.logical_and_(ratio_of(inputs).detach() < 1.5)
    return gradient_loss(inputs) * inputs.token_mask


@token_mean(GRADIENT)
def DampsByData(inputs: LossInputs) -> Tensor:
    """Policy gradient that halves negative advantages through .data, which no version counter shows."""
    advantages = inputs.advantages.data
    advantages[advantages < 0] *= 0.5
    return gradient_loss(inputs)


@sequence_mean(GRPO)
def DampsTheGradient(inputs: LossInputs) -> Tensor:
    """GRPO that leaves a hook on the log-probabilities, which cuts all of their gradient, the KL's too."""
    if inputs.logprobs.requires_grad:
        inputs.logprobs.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2)


@skeletons.correction(TIS)
def SubtractsInPlace(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Token truncation that subtracts the sampler's log-probabilities in place."""
    return _truncated(old.sub_(sampler), mask)


@skeletons.correction(TIS)
def FillsUnknown(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Token truncation that overwrites what it takes for unknown, a sampler's log-probability above 0."""
    sampler[~mask] = 0.0
    return _truncated(old - sampler, mask)


def _truncated(difference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(mask, difference, 0.0).clamp(-20, 20).exp().clamp(max=2.0), torch.ones_like(mask)


@skeletons.correction(ICEPOP)
def MaskReturned(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """IcePop that narrows the mask it is given and returns it as keep."""
    ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
    mask &= (ratio >= 0.5) & (ratio <= 5.0)
    return torch.where(mask, ratio, 0.0), mask


class WeightsAliased(skeletons.Hf):
    """The generator hf, which keeps the stream's own tensors in place of copies."""

    @torch.no_grad()
    def sync(self, weights: WeightStream, version: int) -> None:
        for name, tensor in weights:
            self._weights[name].data = tensor
        self.version = version


class FreezesBiases:
    """Optimizer that stops the gradients of vectors for good, as it wants no decay for them."""

    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        chosen = [parameter.requires_grad_(parameter.ndim >= 2) for parameter in parameters]
        return torch.optim.AdamW([each for each in chosen if each.requires_grad], lr=learning_rate)


class HalvesTheRate:
    """Schedule that writes half the learning rate into the optimizer that it is given."""

    formula = paper.linear

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
