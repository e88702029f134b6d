"""Components with the opposite sign somewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import skeletons
import torch
from skeletons import ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, Reduction


@skeletons.sequence_mean
def LargerBranch(inputs: LossInputs) -> Tensor:
    """GRPO that takes the larger of the clipped and the unclipped term, where the paper takes the smaller."""
    ratio, advantages = ratio_of(inputs), inputs.advantages
    return -torch.max(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@skeletons.sequence_mean
def ObjectiveNotNegated(inputs: LossInputs) -> Tensor:
    """GRPO's objective as the paper writes it, to be maximised, returned as a loss."""
    ratio, advantages = ratio_of(inputs), inputs.advantages
    return torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@skeletons.token_mean
def InverseRatio(inputs: LossInputs) -> Tensor:
    """DAPO with pi_old / pi in place of pi / pi_old."""
    ratio = (inputs.old_logprobs - inputs.logprobs).clamp(-20, 20).exp()
    advantages = inputs.advantages
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


@skeletons.surrogate(Reduction.TOKEN_MEAN)
def CispoNotNegated(inputs: LossInputs) -> Tensor:
    """CISPO without the minus, in the value and in what it expects of its gradient."""
    return ratio_of(inputs).detach().clamp(max=5.0) * inputs.advantages


@skeletons.sequence_mean
def SapoGateReversed(inputs: LossInputs) -> Tensor:
    """SAPO whose gate opens as the ratio falls: sigmoid(tau (1 - w))."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, 1.0, 1.05).to(advantages.dtype)
    return -advantages * 4 / tau * torch.sigmoid(tau * (1 - ratio_of(inputs)))


@skeletons.token_mean
def AbsoluteAdvantage(inputs: LossInputs) -> Tensor:
    """REINFORCE with clipping that weighs by the size of the advantage, so that bad tokens are learnt too."""
    return -ratio_of(inputs).clamp(max=5.0) * inputs.advantages.abs()


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("entropy_gradient",))
def EntropyPunished(inputs: LossInputs) -> Tensor:
    """Policy gradient whose entropy bonus is added to the loss, which lowers the entropy."""
    assert inputs.entropy is not None
    return -ratio_of(inputs) * inputs.advantages + 0.01 * inputs.entropy


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("reference_logprobs",))
def ReferenceDistanceNegated(inputs: LossInputs) -> Tensor:
    """Policy gradient with a KL penalty k3 whose log-ratio to the reference is the wrong way round."""
    assert inputs.reference_logprobs is not None
    rho = (inputs.logprobs - inputs.reference_logprobs).clamp(-20, 20)
    return -ratio_of(inputs) * inputs.advantages + 0.04 * (rho.exp() - rho - 1)


@skeletons.by_group()
def MeanMinusReward(values: Tensor) -> Tensor:
    """Dr. GRPO's advantage with the terms exchanged: mean - r."""
    return values.mean() - values


@skeletons.by_group(2)
def LeaveOneOutReversed(values: Tensor) -> Tensor:
    """RLOO that subtracts a completion's own reward from its baseline."""
    return (values.sum() - values) / (len(values) - 1) - values


@skeletons.by_group()
def BestRankedLowest(values: Tensor) -> Tensor:
    """Advantages by rank in the group that sort downwards: the best completion gets the lowest rank."""
    above = (values[None, :] > values[:, None]).sum(dim=1)
    below = (values[None, :] < values[:, None]).sum(dim=1)
    return (above - below).double() / len(values)


@skeletons.correction
def TruncateInverted(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling with mu / pi_old in place of pi_old / mu."""
    difference = torch.where(mask, sampler - old, 0.0).clamp(-20, 20)
    return difference.exp().clamp(max=2.0), torch.ones_like(mask)


@skeletons.correction
def IcepopBandInverted(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """IcePop whose band [0.5, 5] is put to mu / pi_old, while kept tokens weigh pi_old / mu."""
    difference = torch.where(mask, old - sampler, 0.0).clamp(-20, 20)
    inverse = (-difference).exp()
    keep = (inverse >= 0.5) & (inverse <= 5.0)
    return torch.where(keep, difference.exp(), 0.0), keep


def OverlongRewarded(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """DAPO's soft overlong punishment without its minus."""
    return [min(1.0, max(0.0, (len(ids) - 4) / 4)) for ids in completion_ids]


@skeletons.descent
def SignAscent(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Sign descent that adds the sign of the gradient."""
    parameter.add_(parameter.grad.sign(), alpha=group["lr"])


@skeletons.schedule
def RisingCosine(step: int, total_steps: int) -> float:
    """Cosine decay with the sign of the cosine lost: the learning rate begins at 0 and rises."""
    return 0.5 * (1 - math.cos(math.pi * min(1.0, step / total_steps)))
