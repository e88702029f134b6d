"""Components with the opposite sign somewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from skeletons import ByGroup, Descent, SequenceMean, TokenMean, ratio_of
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction


class LargerBranch(SequenceMean):
    """GRPO that takes the larger of the clipped and the unclipped term, where the paper takes the smaller."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        return LossOutput(-torch.max(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))


class ObjectiveNotNegated(SequenceMean):
    """GRPO's objective as the paper writes it, to be maximised, returned as a loss."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        return LossOutput(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))


class InverseRatio(TokenMean):
    """DAPO with pi_old / pi in place of pi / pi_old."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = (inputs.old_logprobs - inputs.logprobs).clamp(-20, 20).exp()
        advantages = inputs.advantages
        return LossOutput(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages))


class CispoNotNegated(TokenMean):
    """CISPO without the minus, in the value and in what it expects of its gradient."""

    gradient = "surrogate"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(self.expected_gradient(inputs) * inputs.logprobs)

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        return ratio_of(inputs).detach().clamp(max=5.0) * inputs.advantages


class SapoGateReversed(SequenceMean):
    """SAPO whose gate opens as the ratio falls: sigmoid(tau (1 - w))."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.advantages
        tau = torch.where(advantages > 0, 1.0, 1.05).to(advantages.dtype)
        return LossOutput(-advantages * 4 / tau * torch.sigmoid(tau * (1 - ratio_of(inputs))))


class AbsoluteAdvantage(TokenMean):
    """REINFORCE with clipping that weighs by the size of the advantage, so that bad tokens are learnt too."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-ratio_of(inputs).clamp(max=5.0) * inputs.advantages.abs())


class EntropyPunished:
    """Policy gradient whose entropy bonus is added to the loss, which lowers the entropy."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("entropy_gradient",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        return LossOutput(-ratio_of(inputs) * inputs.advantages + 0.01 * inputs.entropy)


class ReferenceDistanceNegated:
    """Policy gradient with a KL penalty k3 whose log-ratio to the reference is the wrong way round."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("reference_logprobs",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.reference_logprobs is not None
        rho = (inputs.logprobs - inputs.reference_logprobs).clamp(-20, 20)
        return LossOutput(-ratio_of(inputs) * inputs.advantages + 0.04 * (rho.exp() - rho - 1))


class MeanMinusReward(ByGroup):
    """Dr. GRPO's advantage with the terms exchanged: mean - r."""

    def advantages(self, values: Tensor) -> Tensor:
        return values.mean() - values


class LeaveOneOutReversed(ByGroup):
    """RLOO that subtracts a completion's own reward from its baseline."""

    least = 2

    def advantages(self, values: Tensor) -> Tensor:
        return (values.sum() - values) / (len(values) - 1) - values


class BestRankedLowest(ByGroup):
    """Advantages by rank in the group that sort downwards: the best completion gets the lowest rank."""

    def advantages(self, values: Tensor) -> Tensor:
        above = (values[None, :] > values[:, None]).sum(dim=1)
        below = (values[None, :] < values[:, None]).sum(dim=1)
        return (above - below).double() / len(values)


class TruncateInverted:
    """Truncated importance sampling with mu / pi_old in place of pi_old / mu."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        difference = torch.where(mask, sampler - old, 0.0).clamp(-20, 20)
        return difference.exp().clamp(max=2.0), torch.ones_like(mask)


class IcepopBandInverted:
    """IcePop whose band [0.5, 5] is put to mu / pi_old, while kept tokens weigh pi_old / mu."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        difference = torch.where(mask, old - sampler, 0.0).clamp(-20, 20)
        inverse = (-difference).exp()
        keep = (inverse >= 0.5) & (inverse <= 5.0)
        return torch.where(keep, difference.exp(), 0.0), keep


class OverlongRewarded:
    """DAPO's soft overlong punishment without its minus."""

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [min(1.0, max(0.0, (len(ids) - 4) / 4)) for ids in completion_ids]


class SignAscent(Descent):
    """Sign descent that adds the sign of the gradient."""

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        parameter.add_(parameter.grad.sign(), alpha=group["lr"])


class RisingCosine:
    """Cosine decay with the sign of the cosine lost: the learning rate begins at 0 and rises."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 - math.cos(math.pi * min(1.0, step / total_steps)))
        )
