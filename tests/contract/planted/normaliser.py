"""Components that divide by the wrong number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import references as paper
import skeletons
import torch
from references import DAPO, GRADIENT, GRPO, GSPO, TIS
from skeletons import clipped_loss, lengths, ratio_of, sequence_mean, sequences, totals
from torch import Tensor

from grpox.contracts import LossInputs, Reduction, Text, completion_text

RowsOfTheBatch = sequences(GRPO, lambda w, a: clipped_loss(w, a, 0.2, 0.2) / len(w))
"""GRPO that divides by the rows of its micro-batch as well as by the core's normaliser."""
DapoBySequence = sequences(DAPO, lambda w, a: clipped_loss(w, a, 0.2, 0.28))
"""DAPO that declares GRPO's reduction: every sequence counts the same."""
GspoOverPositions = sequences(
    GSPO, lambda w, a: clipped_loss(w.log().mean(dim=1, keepdim=True).exp().expand_as(w), a, 3e-4, 4e-4)
)
"""GSPO whose mean of log-ratios is over all positions, padding included."""


@skeletons.token_mean(DAPO)
def OwnTokenMean(inputs: LossInputs) -> Tensor:
    """DAPO that averages over the tokens of its micro-batch itself, as a stand-alone loss does."""
    loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
    mean = (loss * inputs.token_mask).sum() / inputs.token_mask.sum().clamp(min=1)
    return mean.expand_as(loss)


@skeletons.loss(Reduction.SEQUENCE_SUM, GRPO, zero_at_zero_advantage=True)
def PaddedLength(inputs: LossInputs) -> Tensor:
    """Dr. GRPO that divides each token by the width of its micro-batch, in the place of the longest length."""
    loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2)
    return loss / loss.shape[1]


@sequence_mean(GRPO)
def LengthTwice(inputs: LossInputs) -> Tensor:
    """GRPO that divides by the length of the completion, which its reduction does once more."""
    return clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2) / lengths(inputs.token_mask)


@skeletons.token_loss()
def WhitensTheMicroBatch(inputs: LossInputs) -> Tensor:
    """PPO that whitens the advantages over its micro-batch."""
    chosen = inputs.advantages[inputs.token_mask]
    spread = chosen.std(correction=0) if len(chosen) else chosen.sum()
    advantages = (inputs.advantages - chosen.sum() / max(len(chosen), 1)) / (spread + 1e-8)
    return clipped_loss(ratio_of(inputs), advantages, 0.2, 0.2)


@skeletons.token_mean(GRADIENT)
def SelfNormalisedRatios(inputs: LossInputs) -> Tensor:
    """REINFORCE with the ratios of a micro-batch divided by their mean, so that they average 1 in each."""
    ratio = ratio_of(inputs)
    mean = torch.where(inputs.token_mask, ratio, 0.0).sum() / inputs.token_mask.sum().clamp(min=1)
    return -ratio / mean.detach().clamp(min=1e-6) * inputs.advantages


NoFloor = skeletons.by_group(paper.standardised, lambda r: (r - r.mean()) / r.std(), least=2)
"""GRPO's advantage divided by the group's standard deviation alone, which may be 0."""


class BatchStdOfPlaceholders(skeletons.ByGroup):
    """Batch-level standard deviation that counts completions without a score as reward 0."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, _ = totals(rewards, weights)
        return super().scale(rewards, weights, group_ids) / (total.std(correction=0) + 1e-4).float()


@skeletons.advantage(paper.leave_one_out)
def GroupSizeOfTheFirst(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """RLOO that divides by the size of the first group, though others may have fewer scored completions."""
    total, scored = totals(rewards, weights)
    size = int((group_ids == group_ids[0]).sum())
    result = torch.zeros_like(total)
    for group in group_ids.unique():
        rows = (group_ids == group) & scored
        if rows.sum() > 1:
            result[rows] = total[rows] - (total[rows].sum() - total[rows]) / (size - 1)
    return result.float()


class WeightsNormalised(skeletons.ByGroup):
    """Dr. GRPO's advantage of the weighted mean of reward functions, where the weighted sum is meant."""

    formula = paper.centred

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        return super().scale(rewards, weights / weights.sum().clamp(min=1e-6), group_ids)


@skeletons.correction()
def GeometricOverPositions(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Geometric mask whose mean is over the width of the micro-batch, padding included."""
    difference = torch.where(mask, old - sampler, 0.0).clamp(-20, 20)
    mean = difference.mean(dim=1, keepdim=True).exp()
    keep = ((mean >= 0.98) & (mean <= 1.02)).expand(mask.shape)
    return torch.where(keep, difference.exp(), 0.0), keep


WeightsOfMeanOne = skeletons.weights(
    TIS, lambda d, mask: _over_mean(d.clamp(-20, 20).exp().clamp(max=2.0), mask)
)
"""Token truncation whose weights are divided by their mean over the micro-batch."""


def _over_mean(weights: Tensor, mask: Tensor) -> Tensor:
    mean = (weights * mask).sum() / mask.sum().clamp(min=1)
    return weights / mean.clamp(min=1e-6)


def ShareOfTheLongest(*, completions: Sequence[Text], **columns: Any) -> list[float]:
    """Length reward relative to the longest completion of the call, which may hold any groups."""
    lengths = [len(completion_text(text)) for text in completions]
    longest = max(1, *lengths, 1)
    return [-length / longest for length in lengths]
