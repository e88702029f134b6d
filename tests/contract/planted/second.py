"""Errors of several families that a second author planted, each in an otherwise right component."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import references as paper
import skeletons
import torch
from references import GRADIENT, GRPO, TIS, WIDE_GSPO
from skeletons import ByGroup, by_group, clipped_loss, gradient_loss, ratio_of, row_sums, token_loss, weights
from torch import Tensor

from grpox.contracts import AdvantageInputs, LossInputs, Reduction

sequence_loss = partial(skeletons.loss, Reduction.SEQUENCE_MEAN)

GspoLengthPlusOne = skeletons.clipped(
    sequence_loss, WIDE_GSPO, 0.2, 0.2, lambda d, mask: (row_sums(d) / (row_sums(mask) + 1)).exp()
)
"""GSPO that counts one token too many."""


@sequence_loss(WIDE_GSPO)
def LengthOfUncertain(inputs: LossInputs) -> Tensor:
    """GSPO that takes tokens of probability 1 for padding."""
    uncertain = inputs.token_mask & (inputs.logprobs < -1e-3)
    ratio = skeletons.row_means(skeletons.log_ratio_of(inputs), uncertain).exp()
    return clipped_loss(ratio.expand_as(inputs.logprobs), inputs.advantages, 0.2, 0.2)


@token_loss(paper.dual_clipped)
def DualClipForGood(inputs: LossInputs) -> Tensor:
    """Dual clip that bounds the loss of positive advantages, where the paper bounds that of negative ones."""
    smaller, advantages = -clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2), inputs.advantages
    return -torch.where(advantages > 0, torch.min(smaller, 3 * advantages), smaller)


@token_loss(GRPO)
def UnclippedBranchDetached(inputs: LossInputs) -> Tensor:
    """GRPO whose unclipped branch has no gradient."""
    ratio, advantages = ratio_of(inputs), inputs.advantages
    return -torch.min(ratio.detach() * advantages, ratio.clamp(0.8, 1.2) * advantages)


@token_loss(paper.with_reference, needs=("reference_logprobs",))
def HalfThePenalty(inputs: LossInputs) -> Tensor:
    """Policy gradient with half the KL penalty to the reference."""
    return gradient_loss(inputs) + 0.02 * skeletons.k3(inputs.reference_logprobs - inputs.logprobs)


@token_loss()
def DiscountByPlace(inputs: LossInputs) -> Tensor:
    """Policy gradient that discounts a token by its position, masked ones included."""
    places = torch.arange(inputs.logprobs.shape[1], device=inputs.logprobs.device)
    return gradient_loss(inputs) * 0.99 ** places.to(inputs.logprobs.dtype)


@sequence_loss(scope="group", sign="other", needs=("group_ids",))
def PairsOfAllGroups(inputs: LossInputs) -> Tensor:
    """Pairwise preference that compares completions of other prompts, too."""
    mask = inputs.token_mask
    pair = (inputs.logprobs, inputs.advantages)
    scores, quality = (skeletons.row_means(each, mask).squeeze(1) for each in pair)
    margins = torch.nn.functional.softplus(scores[None] - scores[:, None])
    losses = torch.where(quality[:, None] > quality[None], margins, 0.0).sum(1)
    return losses[:, None] * mask


@sequence_loss(sign="other", needs=("rewards",))
def AbstentionIsNan(inputs: LossInputs) -> Tensor:
    """Reward-weighted likelihood that sums NaN where a function abstained."""
    return -row_sums(inputs.rewards).clamp(-5, 5).exp().to(inputs.logprobs) * inputs.logprobs


@skeletons.surrogate(Reduction.SEQUENCE_SUM, paper.topr_gradient)
def TaperOfTheGood(inputs: LossInputs) -> Tensor:
    """TOPR that tapers positive advantages, where the paper tapers negative ones."""
    ratio = ratio_of(inputs).detach()
    weights = torch.where(inputs.advantages > 0, ratio.clamp(max=1), torch.ones_like(ratio))
    return -weights * inputs.advantages


@token_loss(paper.with_entropy, needs=("entropy_gradient",))
def EntropyByLength(inputs: LossInputs) -> Tensor:
    """Policy gradient whose entropy bonus is divided by the length, which the core does too."""
    return gradient_loss(inputs) - 0.01 * inputs.entropy / skeletons.lengths(inputs.token_mask)


@token_loss(needs=("columns",), example_columns={"weight": (1.0, 2.0)})
def ColumnOfTheNext(inputs: LossInputs) -> Tensor:
    """Policy gradient weighted by the column of the next row."""
    weights = list(inputs.columns["weight"])
    return gradient_loss(inputs) * inputs.logprobs.new_tensor([*weights[1:], *weights[:1]])[:, None]


@token_loss(folds_correction=True)
def NeverCorrects(inputs: LossInputs) -> Tensor:
    """Policy gradient that declares to fold the correction, and does not."""
    return gradient_loss(inputs)


@token_loss(GRADIENT)
def ThousandFold(inputs: LossInputs) -> Tensor:
    """Policy gradient that forgot to divide by 1,000."""
    return 1000 * gradient_loss(inputs)


class CapShrinksByCalls(skeletons.CappedGradient):
    """Capped ratio whose cap shrinks with each begin_step, whatever the step is."""

    stateless = True

    def begin_step(self, context: Any) -> None:
        self.cap *= 0.9


class RunningMeanOfNan(skeletons.Saved, skeletons.CappedGradient):
    """Capped ratio whose cap follows the ratios, those of a step that was skipped included."""

    statistics: ClassVar[dict[str, str]] = {"ratio": "max"}
    saved = ("cap",)

    def end_step(self, statistics: dict[str, Any]) -> None:
        self.cap = 0.9 * self.cap + 0.1 * statistics["ratio"]


@skeletons.advantage(paper.standardised)
def SpreadOfTheBatch(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """GRPO's advantage over the batch's standard deviation."""
    total, scored = skeletons.totals(rewards, weights)
    spread = total[scored].std(unbiased=False).nan_to_num().float() + 1e-4
    return ByGroup().scale(rewards, weights, group_ids) / spread


@skeletons.advantage(paper.centred)
def MeanOfTheBatch(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of the batch, where the group's is meant."""
    total, scored = skeletons.totals(rewards, weights)
    return torch.where(scored, total - total[scored].mean(), 0.0).float()


@skeletons.advantage()
def GroupsModulo(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Takes every eighth group for the same."""
    return ByGroup().scale(rewards, weights, group_ids % 8)


OthersOverAll = by_group(paper.leave_one_out, lambda r: r - (r.sum() - r) / len(r), least=2)
"""RLOO that divides the sum of the others by the size of the group."""
PopulationDeviation = by_group(
    paper.standardised, lambda r: (r - r.mean()) / (r.std(unbiased=False) + 1e-4), least=2
)
"""GRPO's advantage over the deviation of a population, where the sample's is meant."""


class FirstTurnOfTheLast:
    """Gives the first turn the advantage of the row before."""

    per = "turn"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        values = ByGroup().scale(inputs.rewards, inputs.weights, inputs.group_ids)
        rows = zip(inputs.turns, values, strict=True)
        result = [torch.full((len(turns),), float(value)) for turns, value in rows]
        for row, before in enumerate(values.roll(1).tolist()):
            result[row][0] = before
        return result


FloorForCap = weights(TIS, lambda d, mask: d.clamp(-20, 20).exp().clamp(min=0.5))
"""Truncated importance sampling that bounds weights below."""
RootOfTheRatio = weights(TIS, lambda d, mask: (d / 2).clamp(-20, 20).exp().clamp(max=2.0))
"""Truncated importance sampling by the root of the ratio."""
LastPosition = weights(None, lambda d, mask: d[:, -1:].clamp(-20, 20).exp().clamp(max=2.0))
"""Weighs a completion by its last position."""
WeighsNothing = weights(None, lambda d, mask: torch.ones_like(d))
"""Forgets to use the ratio."""


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


TwiceAsFast = skeletons.schedule(None, lambda step, total: max(0.0, 1 - 2 * step / total))
"""Linear decay that is at 0 halfway."""
