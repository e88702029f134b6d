"""Errors of several families that a second author planted, each in an otherwise right component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import skeletons
import torch
from skeletons import log_ratio_of, ratio_of, totals
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


@skeletons.loss(Reduction.TOKEN_MEAN)
def DualClipForGood(inputs: LossInputs) -> Tensor:
    """Dual clip that bounds the loss of positive advantages, where the paper bounds that of negative ones."""
    ratio, advantages = ratio_of(inputs), inputs.advantages
    smaller = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -torch.where(advantages > 0, torch.min(smaller, 3 * advantages), smaller)


@skeletons.loss(Reduction.TOKEN_MEAN)
def UnclippedBranchDetached(inputs: LossInputs) -> Tensor:
    """GRPO whose unclipped branch has no gradient."""
    ratio, advantages = ratio_of(inputs), inputs.advantages
    return -torch.min(ratio.detach() * advantages, ratio.clamp(0.8, 1.2) * advantages)


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("reference_logprobs",))
def HalfThePenalty(inputs: LossInputs) -> Tensor:
    """Policy gradient with half the KL penalty to the reference."""
    assert inputs.reference_logprobs is not None
    rho = (inputs.reference_logprobs - inputs.logprobs).clamp(-20, 20)
    return _gradient(inputs) + 0.02 * (rho.exp() - rho - 1)


@skeletons.loss(Reduction.TOKEN_MEAN)
def DiscountByPlace(inputs: LossInputs) -> Tensor:
    """Policy gradient that discounts a token by its position, masked ones included."""
    places = torch.arange(inputs.logprobs.shape[1], device=inputs.logprobs.device)
    return _gradient(inputs) * 0.99 ** places.to(inputs.logprobs.dtype)


@skeletons.loss(Reduction.SEQUENCE_MEAN, scope="group", sign="other", needs=("group_ids",))
def PairsOfAllGroups(inputs: LossInputs) -> Tensor:
    """Pairwise preference that compares completions of other prompts, too."""
    mask = inputs.token_mask
    counts = mask.sum(1).clamp(min=1)
    scores, quality = (
        torch.where(mask, each, 0.0).sum(1) / counts for each in (inputs.logprobs, inputs.advantages)
    )
    margins = torch.nn.functional.softplus(scores[None] - scores[:, None])
    losses = torch.where(quality[:, None] > quality[None], margins, 0.0).sum(1)
    return losses[:, None] * mask


@skeletons.loss(Reduction.SEQUENCE_MEAN, sign="other", needs=("rewards",))
def AbstentionIsNan(inputs: LossInputs) -> Tensor:
    """Reward-weighted likelihood that sums NaN where a function abstained."""
    assert inputs.rewards is not None
    weights = inputs.rewards.sum(1, keepdim=True).clamp(-5, 5).exp().to(inputs.logprobs)
    return -weights * inputs.logprobs


@skeletons.surrogate(Reduction.SEQUENCE_SUM)
def TaperOfTheGood(inputs: LossInputs) -> Tensor:
    """TOPR that tapers positive advantages, where the paper tapers negative ones."""
    ratio = ratio_of(inputs).detach()
    weights = torch.where(inputs.advantages > 0, ratio.clamp(max=1), torch.ones_like(ratio))
    return -weights * inputs.advantages


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("entropy_gradient",))
def EntropyByLength(inputs: LossInputs) -> Tensor:
    """Policy gradient whose entropy bonus is divided by the length, which the core does too."""
    assert inputs.entropy is not None
    counts = inputs.token_mask.sum(1, keepdim=True).clamp(min=1)
    return _gradient(inputs) - 0.01 * inputs.entropy / counts


@skeletons.loss(Reduction.TOKEN_MEAN, needs=("columns",), example_columns={"weight": (1.0, 2.0)})
def ColumnOfTheNext(inputs: LossInputs) -> Tensor:
    """Policy gradient weighted by the column of the next row."""
    assert inputs.columns is not None
    weights = list(inputs.columns["weight"])
    shifted = inputs.logprobs.new_tensor([*weights[1:], *weights[:1]])
    return _gradient(inputs) * shifted[:, None]


@skeletons.loss(Reduction.TOKEN_MEAN, folds_correction=True)
def NeverCorrects(inputs: LossInputs) -> Tensor:
    """Policy gradient that declares to fold the correction, and does not."""
    return _gradient(inputs)


@skeletons.loss(Reduction.TOKEN_MEAN)
def ThousandFold(inputs: LossInputs) -> Tensor:
    """Policy gradient that forgot to divide by 1,000."""
    return 1000 * _gradient(inputs)


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


@skeletons.advantage
def SpreadOfTheBatch(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """GRPO's advantage over the batch's standard deviation."""
    total, scored = totals(rewards, weights)
    spread = total[scored].std(unbiased=False).nan_to_num().float() + 1e-4
    return skeletons.ByGroup().scale(rewards, weights, group_ids) / spread


@skeletons.by_group(2)
def OthersOverAll(values: Tensor) -> Tensor:
    """RLOO that divides the sum of the others by the size of the group."""
    return values - (values.sum() - values) / len(values)


@skeletons.by_group(2)
def PopulationDeviation(values: Tensor) -> Tensor:
    """GRPO's advantage over the deviation of a population, where the sample's is meant."""
    return (values - values.mean()) / (values.std(unbiased=False) + 1e-4)


@skeletons.advantage
def MeanOfTheBatch(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of the batch, where the group's is meant."""
    total, scored = totals(rewards, weights)
    return torch.where(scored, total - total[scored].mean(), 0.0).float()


@skeletons.advantage
def GroupsModulo(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Takes every eighth group for the same."""
    return skeletons.ByGroup().scale(rewards, weights, group_ids % 8)


class FirstTurnOfTheLast:
    """Gives the first turn the advantage of the row before."""

    per = "turn"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        values = skeletons.ByGroup().scale(inputs.rewards, inputs.weights, inputs.group_ids)
        rows = zip(inputs.turns, values, strict=True)
        result = [torch.full((len(turns),), float(value)) for turns, value in rows]
        for row, before in enumerate(values.roll(1).tolist()):
            result[row][0] = before
        return result


@skeletons.correction
def FloorForCap(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling that bounds weights below."""
    return (old - sampler).clamp(-20, 20).exp().clamp(min=0.5), torch.ones_like(mask)


@skeletons.correction
def RootOfTheRatio(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling by the root of the ratio."""
    return ((old - sampler) / 2).clamp(-20, 20).exp().clamp(max=2.0), torch.ones_like(mask)


@skeletons.correction
def LastPosition(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Weighs a completion by its last position."""
    last = torch.where(mask, old - sampler, 0.0)[:, -1:]
    return last.clamp(-20, 20).exp().clamp(max=2.0).expand(mask.shape).contiguous(), torch.ones_like(mask)


@skeletons.correction
def WeighsNothing(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Forgets to use the ratio."""
    return torch.ones_like(old), torch.ones_like(mask)


def RunningScore(*, completions: Sequence[str], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Adds half of the score before."""
    score, scores = 0.0, []
    for completion, right in zip(completions, answer, strict=True):
        score = score / 2 + float(completion == str(right))
        scores.append(score)
    return scores


def AnswerOfTheNext(*, completions: Sequence[str], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Compares with the answer of the next row."""
    shifted = [*answer[1:], *answer[:1]]
    return [float(text == str(right)) for text, right in zip(completions, shifted, strict=True)]


class PointsShared:
    """Divides the points of a token by the number of completions in the call."""

    per = "token"

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[list[float]]:
        return [[token / (1 + len(completion_ids)) for token in ids] for ids in completion_ids]


@skeletons.descent
def DecayGrows(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Weight decay with the wrong sign."""
    parameter.mul_(1 + 0.1 * group["lr"]).add_(parameter.grad.sign(), alpha=-group["lr"])


@skeletons.descent
def StepsOfParameters(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Corrects the bias of the momentum by a number of steps that counts parameters."""
    group["steps"] = group.get("steps", 0) + 1
    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
    momentum.lerp_(parameter.grad, 0.1)
    parameter.add_(momentum / (1 - 0.9 ** group["steps"]), alpha=-group["lr"])


@skeletons.descent
def NormOfParameter(parameter: Any, group: Any, state: dict[str, Any]) -> None:
    """Normalises each parameter's gradient, which ZeRO-3 cuts."""
    parameter.add_(parameter.grad / (parameter.grad.norm() + 1e-8), alpha=-group["lr"])


@skeletons.schedule
def TwiceAsFast(step: int, total_steps: int) -> float:
    """Linear decay that is at 0 halfway."""
    return max(0.0, 1 - 2 * step / total_steps)
