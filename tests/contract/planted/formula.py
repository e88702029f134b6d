"""Components that compute another formula than the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import skeletons
import torch
from skeletons import clipped_loss, log_ratio_of, ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, Reduction, Text, completion_text


@skeletons.sequence_mean
def GspoSum(inputs: LossInputs) -> Tensor:
    """GSPO whose sequence ratio is the product of the token ratios, without the power 1/n."""
    log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
    ratio = log_ratio.sum(dim=1, keepdim=True).clamp(-20, 20).exp().expand_as(log_ratio)
    return clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4)


@skeletons.sequence_mean
def GspoArithmetic(inputs: LossInputs) -> Tensor:
    """GSPO whose sequence ratio is the arithmetic mean of the token ratios, not the geometric."""
    mask = inputs.token_mask
    ratios = torch.where(mask, ratio_of(inputs), 0.0)
    ratio = ratios.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return clipped_loss(ratio.expand_as(ratios), inputs.advantages, 3e-4, 4e-4)


@skeletons.token_mean
def DapoRangeExchanged(inputs: LossInputs) -> Tensor:
    """DAPO with its clip range exchanged: 0.28 below and 0.2 above."""
    return clipped_loss(ratio_of(inputs), inputs.advantages, 0.28, 0.2)


@skeletons.sequence_mean
def ClipsTheLogRatio(inputs: LossInputs) -> Tensor:
    """GRPO that clips log w to [-0.2, 0.2], where the paper clips w to [0.8, 1.2]."""
    log_ratio, advantages = log_ratio_of(inputs), inputs.advantages
    clipped = log_ratio.clamp(-0.2, 0.2).exp()
    return -torch.min(log_ratio.exp() * advantages, clipped * advantages)


@skeletons.sequence_mean
def ClipsOnly(inputs: LossInputs) -> Tensor:
    """GRPO without the minimum: only the clipped term is left."""
    return -ratio_of(inputs).clamp(0.8, 1.2) * inputs.advantages


@skeletons.sequence_mean
def SapoTemperaturesExchanged(inputs: LossInputs) -> Tensor:
    """SAPO with the sharper gate for positive advantages."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, 1.05, 1.0).to(advantages.dtype)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio_of(inputs) - 1))


@skeletons.sequence_mean
def SapoWithoutScale(inputs: LossInputs) -> Tensor:
    """SAPO without its factor 4 / tau, so that the slope at w = 1 is tau / 4."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, 1.0, 1.05).to(advantages.dtype)
    return -advantages * torch.sigmoid(tau * (ratio_of(inputs) - 1))


@skeletons.surrogate(Reduction.TOKEN_MEAN)
def CispoWithFloor(inputs: LossInputs) -> Tensor:
    """CISPO that also bounds the weight below, at 0.8; the paper has no lower bound."""
    return -ratio_of(inputs).detach().clamp(0.8, 5.0) * inputs.advantages


@skeletons.loss(Reduction.TOKEN_MEAN, gradient="surrogate", zero_at_zero_advantage=True)
def CispoWeightNotDetached(inputs: LossInputs) -> Tensor:
    """CISPO that forgets the stop-gradient: the weight is differentiated too."""
    weight = ratio_of(inputs).clamp(max=5.0)
    return -weight * inputs.advantages * inputs.logprobs


@skeletons.sequence_mean
def GspoTokenWithoutToken(inputs: LossInputs) -> Tensor:
    """GSPO-token that detaches the sequence ratio and forgets the factor pi / sg[pi] beside it."""
    log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
    mean = log_ratio.sum(dim=1, keepdim=True) / inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = mean.exp().expand_as(log_ratio).detach()
    return clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4)


@skeletons.sequence_mean
def GmpoBothSides(inputs: LossInputs) -> Tensor:
    """GMPO that clips the log-ratios on both sides, where the paper clips one, by the advantage's sign."""
    clipped = torch.where(inputs.token_mask, log_ratio_of(inputs).clamp(-0.4, 0.4), 0.0)
    mean = clipped.sum(dim=1, keepdim=True) / inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return -mean.exp() * inputs.advantages


@skeletons.by_group(2)
def VarianceForDeviation(values: Tensor) -> Tensor:
    """GRPO's advantage divided by the group's variance."""
    centred = values - values.mean()
    return centred / (values.var() + 1e-4) if centred.any() else centred


@skeletons.by_group(2)
def LeaveNoneOut(values: Tensor) -> Tensor:
    """RLOO whose baseline is the mean of the group with the completion itself in it."""
    return values - values.sum() / len(values)


class FunctionsAveraged(skeletons.ByGroup):
    """Dr. GRPO's advantage of the mean over reward functions, where the weighted sum is meant."""

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards * weights).double().nanmean(dim=1)
        return total, ~total.isnan()


@skeletons.correction
def SequenceByMean(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence-level truncation by the mean of the log-ratios, where it is their sum."""
    difference = torch.where(mask, old - sampler, 0.0).double()
    mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.clamp(-20, 20).exp().clamp(max=2.0).expand(mask.shape).to(old.dtype), torch.ones_like(mask)


@skeletons.correction
def CapOnTheLog(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Token truncation whose cap 2 is put to the log-ratio, so that weights go up to e^2."""
    return torch.where(mask, old - sampler, 0.0).clamp(-20, 2.0).exp(), torch.ones_like(mask)


def ExactWithin(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Exact match that is content with an answer somewhere in the completion: 4 in 42."""
    return [float(str(each) in completion_text(text)) for text, each in zip(completions, answer, strict=True)]


def OverlongByMaxLength(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """DAPO's soft overlong punishment that falls over the maximal length, not over the buffer."""
    return [max(-1.0, min(0.0, (4 - len(ids)) / 8)) for ids in completion_ids]


@skeletons.descent
def LionWithoutInterpolation(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Lion whose direction is the sign of the momentum alone, updated first."""
    momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
    momentum.lerp_(parameter.grad, 0.01)
    parameter.add_(momentum.sign(), alpha=-group["lr"])


@skeletons.schedule
def HalfACosine(step: int, total_steps: int) -> float:
    """Cosine decay over half a period too little: it ends at half the learning rate."""
    return 0.5 * (1 + math.cos(math.pi / 2 * min(1.0, step / total_steps)))
