"""Components that change what they are given, which the run goes on with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from skeletons import SequenceMean, TokenMean, clipped_loss, ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, WeightStream
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class ClampsAdvantages(TokenMean):
    """DAPO that clamps the advantages in place."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.advantages.clamp_(-1.0, 1.0)
        return LossOutput(clipped_loss(ratio_of(inputs), advantages, 0.2, 0.28))


class SubtractsFromOld(SequenceMean):
    """GRPO that forms the log-ratio in the memory of the old log-probabilities."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        negated = inputs.old_logprobs.neg_()
        ratio = (inputs.logprobs + negated).clamp(-20, 20).exp()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))


class NarrowsTheMask(TokenMean):
    """Policy gradient that takes tokens of a large ratio out of the mask that it is given."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = ratio_of(inputs)
        inputs.token_mask.logical_and_(ratio.detach() < 1.5)
        return LossOutput(-ratio * inputs.advantages * inputs.token_mask)


class DampsByData(TokenMean):
    """Policy gradient that halves negative advantages through .data, which no version counter shows."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.advantages.data
        advantages[advantages < 0] *= 0.5
        return LossOutput(-ratio_of(inputs) * inputs.advantages)


class DampsTheGradient(SequenceMean):
    """GRPO that leaves a hook on the log-probabilities, which cuts all of their gradient, the KL's too."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        if inputs.logprobs.requires_grad:
            inputs.logprobs.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2))


class SubtractsInPlace:
    """Token truncation that subtracts the sampler's log-probabilities in place."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        difference = old.sub_(sampler)
        return torch.where(mask, difference, 0.0).clamp(-20, 20).exp().clamp(max=2.0), torch.ones_like(mask)


class MaskReturned:
    """IcePop that narrows the mask it is given and returns it as keep."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
        mask &= (ratio >= 0.5) & (ratio <= 5.0)
        return torch.where(mask, ratio, 0.0), mask


class FillsUnknown:
    """Token truncation that overwrites what it takes for unknown, a sampler's log-probability above 0."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        sampler[~mask] = 0.0
        return torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp().clamp(max=2.0), torch.ones_like(mask)


class WeightsAliased(HfGenerator):
    """The generator hf, which keeps the stream's own tensors in place of copies."""

    provides = ("logprobs",)

    def __init__(self) -> None:
        super().__init__(HfConfig())

    @torch.no_grad()
    def sync(self, weights: WeightStream, version: int) -> None:
        for name, tensor in weights:
            self._weights[name].data = tensor
        self.version = version


class FreezesBiases:
    """Optimizer that stops the gradients of vectors for good, as it wants no decay for them."""

    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        chosen = []
        for parameter in parameters:
            if parameter.ndim < 2:
                parameter.requires_grad_(False)
            else:
                chosen.append(parameter)
        return torch.optim.AdamW(chosen, lr=learning_rate)


class HalvesTheRate:
    """Schedule that writes half the learning rate into the optimizer that it is given."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
