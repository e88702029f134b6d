"""Errors of several families that a second author planted, each in an otherwise right component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from skeletons import Descent, log_ratio_of, ratio_of
from torch import Tensor

from grpox.contracts import AdvantageInputs, LossInputs, LossOutput, Reduction


def _gradient(inputs: LossInputs) -> Tensor:
    return -ratio_of(inputs) * inputs.advantages


def _clipped(ratio: Tensor, advantages: Tensor) -> LossOutput:
    return LossOutput(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))


class GspoLengthPlusOne:
    """GSPO that counts one token too many."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        difference = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
        mean = difference.sum(1, keepdim=True) / (inputs.token_mask.sum(1, keepdim=True) + 1)
        return _clipped(mean.exp().expand_as(difference), inputs.advantages)


class DualClipForGood:
    """Dual clip that bounds the loss of positive advantages, where the paper bounds that of negative ones."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        smaller = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return LossOutput(-torch.where(advantages > 0, torch.min(smaller, 3 * advantages), smaller))


class UnclippedBranchDetached:
    """GRPO whose unclipped branch has no gradient."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        return LossOutput(-torch.min(ratio.detach() * advantages, ratio.clamp(0.8, 1.2) * advantages))


class HalfThePenalty:
    """Policy gradient with half the KL penalty to the reference."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("reference_logprobs",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.reference_logprobs is not None
        rho = (inputs.reference_logprobs - inputs.logprobs).clamp(-20, 20)
        return LossOutput(_gradient(inputs) + 0.02 * (rho.exp() - rho - 1))


class DiscountByPlace:
    """Policy gradient that discounts a token by its position, masked ones included."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        places = torch.arange(inputs.logprobs.shape[1], device=inputs.logprobs.device)
        return LossOutput(_gradient(inputs) * 0.99 ** places.to(inputs.logprobs.dtype))


class PairsOfAllGroups:
    """Pairwise preference that compares completions of other prompts, too."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    scope = "group"
    sign = "other"
    needs = ("group_ids",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        mask = inputs.token_mask
        counts = mask.sum(1).clamp(min=1)
        scores, quality = (
            torch.where(mask, each, 0.0).sum(1) / counts for each in (inputs.logprobs, inputs.advantages)
        )
        margins = torch.nn.functional.softplus(scores[None] - scores[:, None])
        losses = torch.where(quality[:, None] > quality[None], margins, 0.0).sum(1)
        return LossOutput(losses[:, None] * mask)


class AbstentionIsNan:
    """Reward-weighted likelihood that sums NaN where a function abstained."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    sign = "other"
    needs = ("rewards",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.rewards is not None
        weights = inputs.rewards.sum(1, keepdim=True).clamp(-5, 5).exp().to(inputs.logprobs)
        return LossOutput(-weights * inputs.logprobs)


class TaperOfTheGood:
    """TOPR that tapers positive advantages, where the paper tapers negative ones."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    gradient = "surrogate"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(self.expected_gradient(inputs) * inputs.logprobs)

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        ratio = ratio_of(inputs).detach()
        weights = torch.where(inputs.advantages > 0, ratio.clamp(max=1), torch.ones_like(ratio))
        return -weights * inputs.advantages


class EntropyByLength:
    """Policy gradient whose entropy bonus is divided by the length, which the core does too."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("entropy_gradient",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        counts = inputs.token_mask.sum(1, keepdim=True).clamp(min=1)
        return LossOutput(_gradient(inputs) - 0.01 * inputs.entropy / counts)


class ColumnOfTheNext:
    """Policy gradient weighted by the column of the next row."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = ("columns",)
    example_columns: ClassVar[dict[str, tuple[float, ...]]] = {"weight": (1.0, 2.0)}

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.columns is not None
        weights = list(inputs.columns["weight"])
        shifted = inputs.logprobs.new_tensor([*weights[1:], *weights[:1]])
        return LossOutput(_gradient(inputs) * shifted[:, None])


class NeverCorrects:
    """Policy gradient that declares to fold the correction, and does not."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    folds_correction = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(_gradient(inputs))


class ThousandFold:
    """Policy gradient that forgot to divide by 1,000."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(1000 * _gradient(inputs))


class LengthOfUncertain:
    """GSPO that takes tokens of probability 1 for padding."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        mask = inputs.token_mask & (inputs.logprobs < -1e-3)
        difference = torch.where(mask, log_ratio_of(inputs), 0.0)
        mean = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return _clipped(mean.exp().expand_as(difference), inputs.advantages)


class CapShrinksByCalls:
    """Capped ratio whose cap shrinks with each begin_step, whatever the step is."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    stateless = True

    def __init__(self) -> None:
        self.cap = 3.0

    def begin_step(self, context: Any) -> None:
        self.cap *= 0.9

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        return LossOutput(-torch.min(ratio * advantages, ratio.clamp(max=self.cap) * advantages))


class RunningMeanOfNan:
    """Capped ratio whose cap follows the ratios, those of a step that was skipped included."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    statistics: ClassVar[dict[str, str]] = {"ratio": "max"}

    def __init__(self) -> None:
        self.cap = 3.0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        return LossOutput(-torch.min(ratio * advantages, ratio.clamp(max=self.cap) * advantages))

    def end_step(self, statistics: dict[str, Any]) -> None:
        self.cap = 0.9 * self.cap + 0.1 * statistics["ratio"]

    def state_dict(self) -> dict[str, Any]:
        return {"cap": self.cap}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cap = state["cap"]


class _ByGroup:
    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = (rewards.double() * weights).nansum(1), ~rewards.isnan().all(1)
        result = torch.zeros_like(total)
        for group in self.named(group_ids).unique():
            rows = (self.named(group_ids) == group) & scored
            if int(rows.sum()) > 1:
                result[rows] = self.advantages(total[rows], total[scored])
        return result.float()

    def named(self, group_ids: Tensor) -> Tensor:
        return group_ids

    def advantages(self, rewards: Tensor, batch: Tensor) -> Tensor:
        return rewards - rewards.mean()


class SpreadOfTheBatch(_ByGroup):
    """GRPO's advantage over the batch's standard deviation."""

    def advantages(self, rewards: Tensor, batch: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (batch.std(unbiased=False) + 1e-4)


class OthersOverAll(_ByGroup):
    """RLOO that divides the sum of the others by the size of the group."""

    def advantages(self, rewards: Tensor, batch: Tensor) -> Tensor:
        return rewards - (rewards.sum() - rewards) / len(rewards)


class PopulationDeviation(_ByGroup):
    """GRPO's advantage over the deviation of a population, where the sample's is meant."""

    def advantages(self, rewards: Tensor, batch: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)


class MeanOfTheBatch(_ByGroup):
    """Rewards less the mean of the batch, where the group's is meant."""

    def advantages(self, rewards: Tensor, batch: Tensor) -> Tensor:
        return rewards - batch.mean()


class GroupsModulo(_ByGroup):
    """Takes every eighth group for the same."""

    def named(self, group_ids: Tensor) -> Tensor:
        return group_ids % 8


class FirstTurnOfTheLast:
    """Gives the first turn the advantage of the row before."""

    per = "turn"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        values = _ByGroup().scale(inputs.rewards, inputs.weights, inputs.group_ids)
        rows = zip(inputs.turns, values, strict=True)
        result = [torch.full((len(turns),), float(value)) for turns, value in rows]
        for row, before in enumerate(values.roll(1).tolist()):
            result[row][0] = before
        return result


class FloorForCap:
    """Truncated importance sampling that bounds weights below."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (old - sampler).clamp(-20, 20).exp().clamp(min=0.5), torch.ones_like(mask)


class RootOfTheRatio:
    """Truncated importance sampling by the root of the ratio."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return ((old - sampler) / 2).clamp(-20, 20).exp().clamp(max=2.0), torch.ones_like(mask)


class LastPosition:
    """Weighs a completion by its last position."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        last = torch.where(mask, old - sampler, 0.0)[:, -1:]
        return last.clamp(-20, 20).exp().clamp(max=2.0).expand(mask.shape).contiguous(), torch.ones_like(mask)


class WeighsNothing:
    """Forgets to use the ratio."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(old), torch.ones_like(mask)


class RunningScore:
    """Adds half of the score before."""

    def __call__(self, *, completions: Sequence[str], answer: Sequence[Any], **columns: Any) -> list[float]:
        score, scores = 0.0, []
        for completion, right in zip(completions, answer, strict=True):
            score = score / 2 + float(completion == str(right))
            scores.append(score)
        return scores


class AnswerOfTheNext:
    """Compares with the answer of the next row."""

    def __call__(self, *, completions: Sequence[str], answer: Sequence[Any], **columns: Any) -> list[float]:
        shifted = [*answer[1:], *answer[:1]]
        return [float(text == str(right)) for text, right in zip(completions, shifted, strict=True)]


class PointsShared:
    """Divides the points of a token by the number of completions in the call."""

    per = "token"

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[list[float]]:
        return [[token / (1 + len(completion_ids)) for token in ids] for ids in completion_ids]


class DecayGrows(Descent):
    """Weight decay with the wrong sign."""

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        parameter.mul_(1 + 0.1 * group["lr"]).add_(parameter.grad.sign(), alpha=-group["lr"])


class StepsOfParameters(Descent):
    """Corrects the bias of the momentum by a number of steps that counts parameters."""

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 0.1)
        parameter.add_(momentum / (1 - 0.9 ** group["steps"]), alpha=-group["lr"])


class NormOfParameter(Descent):
    """Normalises each parameter's gradient, which ZeRO-3 cuts."""

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        parameter.add_(parameter.grad / (parameter.grad.norm() + 1e-8), alpha=-group["lr"])


class TwiceAsFast:
    """Linear decay that is at 0 halfway."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - 2 * step / total_steps))
