"""Components that compute another formula than the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from skeletons import ByGroup, Descent, SequenceMean, TokenMean, clipped_loss, log_ratio_of, ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Text, completion_text


class GspoSum(SequenceMean):
    """GSPO whose sequence ratio is the product of the token ratios, without the power 1/n."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
        ratio = log_ratio.sum(dim=1, keepdim=True).clamp(-20, 20).exp().expand_as(log_ratio)
        return LossOutput(clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4))


class GspoArithmetic(SequenceMean):
    """GSPO whose sequence ratio is the arithmetic mean of the token ratios, not the geometric."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        mask = inputs.token_mask
        ratios = torch.where(mask, ratio_of(inputs), 0.0)
        ratio = ratios.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return LossOutput(clipped_loss(ratio.expand_as(ratios), inputs.advantages, 3e-4, 4e-4))


class DapoRangeExchanged(TokenMean):
    """DAPO with its clip range exchanged: 0.28 below and 0.2 above."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, 0.28, 0.2))


class ClipsTheLogRatio(SequenceMean):
    """GRPO that clips log w to [-0.2, 0.2], where the paper clips w to [0.8, 1.2]."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio, advantages = log_ratio_of(inputs), inputs.advantages
        clipped = log_ratio.clamp(-0.2, 0.2).exp()
        return LossOutput(-torch.min(log_ratio.exp() * advantages, clipped * advantages))


class ClipsOnly(SequenceMean):
    """GRPO without the minimum: only the clipped term is left."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-ratio_of(inputs).clamp(0.8, 1.2) * inputs.advantages)


class SapoTemperaturesExchanged(SequenceMean):
    """SAPO with the sharper gate for positive advantages."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.advantages
        tau = torch.where(advantages > 0, 1.05, 1.0).to(advantages.dtype)
        return LossOutput(-advantages * 4 / tau * torch.sigmoid(tau * (ratio_of(inputs) - 1)))


class SapoWithoutScale(SequenceMean):
    """SAPO without its factor 4 / tau, so that the slope at w = 1 is tau / 4."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.advantages
        tau = torch.where(advantages > 0, 1.0, 1.05).to(advantages.dtype)
        return LossOutput(-advantages * torch.sigmoid(tau * (ratio_of(inputs) - 1)))


class CispoWithFloor(TokenMean):
    """CISPO that also bounds the weight below, at 0.8; the paper has no lower bound."""

    gradient = "surrogate"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(self.expected_gradient(inputs) * inputs.logprobs)

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        return -ratio_of(inputs).detach().clamp(0.8, 5.0) * inputs.advantages


class CispoWeightNotDetached(TokenMean):
    """CISPO that forgets the stop-gradient: the weight is differentiated too."""

    gradient = "surrogate"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        weight = ratio_of(inputs).clamp(max=5.0)
        return LossOutput(-weight * inputs.advantages * inputs.logprobs)


class GspoTokenWithoutToken(SequenceMean):
    """GSPO-token that detaches the sequence ratio and forgets the factor pi / sg[pi] beside it."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
        mean = log_ratio.sum(dim=1, keepdim=True) / inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        ratio = mean.exp().expand_as(log_ratio).detach()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4))


class GmpoBothSides(SequenceMean):
    """GMPO that clips the log-ratios on both sides, where the paper clips one, by the advantage's sign."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        clipped = torch.where(inputs.token_mask, log_ratio_of(inputs).clamp(-0.4, 0.4), 0.0)
        mean = clipped.sum(dim=1, keepdim=True) / inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        return LossOutput(-mean.exp() * inputs.advantages)


class VarianceForDeviation(ByGroup):
    """GRPO's advantage divided by the group's variance."""

    least = 2

    def advantages(self, values: Tensor) -> Tensor:
        centred = values - values.mean()
        return centred / (values.var() + 1e-4) if centred.any() else centred


class LeaveNoneOut(ByGroup):
    """RLOO whose baseline is the mean of the group with the completion itself in it."""

    least = 2

    def advantages(self, values: Tensor) -> Tensor:
        return values - values.sum() / len(values)


class FunctionsAveraged(ByGroup):
    """Dr. GRPO's advantage of the mean over reward functions, where the weighted sum is meant."""

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards * weights).double().nanmean(dim=1)
        return total, ~total.isnan()


class SequenceByMean:
    """Sequence-level truncation by the mean of the log-ratios, where it is their sum."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        difference = torch.where(mask, old - sampler, 0.0).double()
        mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return mean.clamp(-20, 20).exp().clamp(max=2.0).expand(mask.shape).to(old.dtype), torch.ones_like(mask)


class CapOnTheLog:
    """Token truncation whose cap 2 is put to the log-ratio, so that weights go up to e^2."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(mask, old - sampler, 0.0).clamp(-20, 2.0).exp(), torch.ones_like(mask)


class ExactWithin:
    """Exact match that is content with an answer somewhere in the completion: 4 in 42."""

    def __call__(self, *, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
        return [
            float(str(each) in completion_text(text)) for text, each in zip(completions, answer, strict=True)
        ]


class OverlongByMaxLength:
    """DAPO's soft overlong punishment that falls over the maximal length, not over the buffer."""

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [max(-1.0, min(0.0, (4 - len(ids)) / 8)) for ids in completion_ids]


class LionWithoutInterpolation(Descent):
    """Lion whose direction is the sign of the momentum alone, updated first."""

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 0.01)
        parameter.add_(momentum.sign(), alpha=-group["lr"])


class HalfACosine:
    """Cosine decay over half a period too little: it ends at half the learning rate."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi / 2 * min(1.0, step / total_steps)))
        )
