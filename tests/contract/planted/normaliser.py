"""Components that divide by the wrong number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from skeletons import ByGroup, SequenceMean, TokenMean, clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction, Text, completion_text


class OwnTokenMean(TokenMean):
    """DAPO that averages over the tokens of its micro-batch itself, as a stand-alone loss does."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
        mean = (loss * inputs.token_mask).sum() / inputs.token_mask.sum().clamp(min=1)
        return LossOutput(mean.expand_as(loss))


class PaddedLength:
    """Dr. GRPO that divides each token by the width of its micro-batch, in the place of the longest length."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    zero_at_zero_advantage = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2)
        return LossOutput(loss / loss.shape[1])


class RowsOfTheBatch(SequenceMean):
    """GRPO that divides by the rows of its micro-batch as well as by the core's normaliser."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2)
        return LossOutput(loss / len(loss))


class GspoOverPositions(SequenceMean):
    """GSPO whose mean of log-ratios is over all positions, padding included."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = log_ratio_of(inputs).mean(dim=1, keepdim=True).exp().expand_as(inputs.logprobs)
        return LossOutput(clipped_loss(ratio, inputs.advantages, 3e-4, 4e-4))


class LengthTwice(SequenceMean):
    """GRPO that divides by the length of the completion, which its reduction does once more."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        lengths = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.2) / lengths)


class WhitensTheMicroBatch:
    """PPO that whitens the advantages over its micro-batch."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        chosen = inputs.advantages[inputs.token_mask]
        spread = chosen.std(correction=0) if len(chosen) else chosen.sum()
        advantages = (inputs.advantages - chosen.sum() / max(len(chosen), 1)) / (spread + 1e-8)
        return LossOutput(clipped_loss(ratio_of(inputs), advantages, 0.2, 0.2))


class DapoBySequence(SequenceMean):
    """DAPO that declares GRPO's reduction: every sequence counts the same."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28))


class SelfNormalisedRatios(TokenMean):
    """REINFORCE with the ratios of a micro-batch divided by their mean, so that they average 1 in each."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = ratio_of(inputs)
        count = inputs.token_mask.sum().clamp(min=1)
        mean = torch.where(inputs.token_mask, ratio, 0.0).sum() / count
        return LossOutput(-ratio / mean.detach().clamp(min=1e-6) * inputs.advantages)


class NoFloor(ByGroup):
    """GRPO's advantage divided by the group's standard deviation alone, which may be 0."""

    least = 2

    def advantages(self, values: Tensor) -> Tensor:
        return (values - values.mean()) / values.std()


class BatchStdOfPlaceholders(ByGroup):
    """Batch-level standard deviation that counts completions without a score as reward 0."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, _ = totals(rewards, weights)
        return super().scale(rewards, weights, group_ids) / (total.std(correction=0) + 1e-4).float()


class GroupSizeOfTheFirst:
    """RLOO that divides by the size of the first group, though others may have fewer scored completions."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = totals(rewards, weights)
        size = int((group_ids == group_ids[0]).sum())
        result = torch.zeros_like(total)
        for group in group_ids.unique():
            rows = (group_ids == group) & scored
            if rows.sum() > 1:
                result[rows] = total[rows] - (total[rows].sum() - total[rows]) / (size - 1)
        return result.float()


class WeightsNormalised(ByGroup):
    """Dr. GRPO's advantage of the weighted mean of reward functions, where the weighted sum is meant."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        return super().scale(rewards, weights / weights.sum().clamp(min=1e-6), group_ids)


class GeometricOverPositions:
    """Geometric mask whose mean is over the width of the micro-batch, padding included."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        difference = torch.where(mask, old - sampler, 0.0).clamp(-20, 20)
        mean = difference.mean(dim=1, keepdim=True).exp()
        keep = ((mean >= 0.98) & (mean <= 1.02)).expand(mask.shape)
        return torch.where(keep, difference.exp(), 0.0), keep


class WeightsOfMeanOne:
    """Token truncation whose weights are divided by their mean over the micro-batch."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp().clamp(max=2.0)
        mean = (weights * mask).sum() / mask.sum().clamp(min=1)
        return weights / mean.clamp(min=1e-6), torch.ones_like(mask)


class ShareOfTheLongest:
    """Length reward relative to the longest completion of the call, which may hold any groups."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        lengths = [len(completion_text(text)) for text in completions]
        longest = max(1, *lengths, 1)
        return [-length / longest for length in lengths]
