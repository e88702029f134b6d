"""Components that give a row, token or group what belongs to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from skeletons import ByGroup, SequenceMean, TokenMean, clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, LossOutput, Prompt, Reduction, Rollout, Text, completion_text
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class SortedByLength(SequenceMean):
    """GSPO that sorts the sequences by length and does not restore their order."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        lengths = inputs.token_mask.sum(dim=1)
        order = lengths.argsort(descending=True, stable=True)
        log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)[order]
        mean = log_ratio.sum(dim=1, keepdim=True) / lengths[order].clamp(min=1).unsqueeze(1)
        return LossOutput(clipped_loss(mean.exp().expand_as(log_ratio), inputs.advantages, 0.2, 0.2))


class ShiftedOld(TokenMean):
    """DAPO that compares each token with the log-probability under pi_old of the token before it."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        old = torch.cat([inputs.old_logprobs[:, :1], inputs.old_logprobs[:, :-1]], dim=1)
        ratio = (inputs.logprobs - old).clamp(-20, 20).exp()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.28))


class SuffixForPrefix(TokenMean):
    """Prefix ratios, the product of the token ratios so far, summed from the end of the sequence."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
        ratio = log_ratio.flip(1).cumsum(dim=1).flip(1).clamp(-20, 20).exp()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))


class NeighbourAdvantage:
    """Policy gradient whose rows are rolled by one against their advantages."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        lengths = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        advantage = (inputs.advantages * inputs.token_mask).sum(dim=1, keepdim=True) / lengths
        return LossOutput(-ratio_of(inputs) * advantage.roll(1, dims=0))


class FlattenedAndRefilled(TokenMean):
    """Policy gradient over the unmasked tokens alone, written back from the left, across the holes."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        mask = inputs.token_mask
        values = (-ratio_of(inputs) * inputs.advantages)[mask]
        loss = torch.zeros_like(inputs.logprobs)
        places = torch.arange(mask.shape[1], device=mask.device) < mask.sum(dim=1, keepdim=True)
        return LossOutput(loss.masked_scatter(places, values))


class TokensByRatio(TokenMean):
    """Policy gradient that caps the ratios in ascending order and gives them back in that order."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = log_ratio_of(inputs).masked_fill(~inputs.token_mask, 20.0)
        ordered = log_ratio.sort(dim=1).values.exp().clamp(max=3.0)
        return LossOutput(-torch.where(inputs.token_mask, ordered, 0.0) * inputs.advantages)


class GroupsAreNeighbours:
    """Dr. GRPO's advantage that takes equal numbers of neighbouring rows for the groups."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, _ = totals(rewards, weights)
        groups = len(group_ids.unique())
        if len(total) % groups:
            raise ValueError("groups of different sizes")
        table = total.view(groups, -1)
        return (table - table.mean(dim=1, keepdim=True)).flatten().float()


class MeansRepeated:
    """Dr. GRPO's advantage whose group means are repeated by the size of each group, as if rows were sorted."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = totals(rewards, weights)
        means, sizes = [], []
        for group in group_ids.unique():
            rows = (group_ids == group) & scored
            means.append(total[rows].mean() if rows.any() else total.new_zeros(()))
            sizes.append(int((group_ids == group).sum()))
        baseline = torch.stack(means).repeat_interleave(torch.tensor(sizes, device=total.device))
        return torch.where(scored, total - baseline, 0.0).float()


class PlacesForRanks(ByGroup):
    """Advantages by rank in the group that sort once: positions in the order, not ranks of the rows."""

    least = 2

    def advantages(self, values: Tensor) -> Tensor:
        if values.max() == values.min():
            return 0 * values
        return values.argsort(stable=True).double() / (len(values) - 1) - 0.5


class NumberIsIndex:
    """Dr. GRPO's advantage that takes the number of a group for its position in the table of means."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = totals(rewards, weights)
        means = []
        for group in group_ids.unique():
            rows = (group_ids == group) & scored
            means.append(total[rows].mean() if rows.any() else total.new_zeros(()))
        baseline = torch.stack(means)[group_ids % len(means)]
        return torch.where(scored, total - baseline, 0.0).float()


class WeightsByRatio:
    """Token truncation that sorts the ratios for its cap and gives the weights back in that order."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
        return ratio.sort(dim=1, descending=True).values.clamp(max=2.0), torch.ones_like(mask)


class EqualsOnce:
    """Judge that asks once for equal completions and returns the scores of the different ones."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        different = dict.fromkeys(completion_text(text) for text in completions)
        return [float(len(text) < 5) for text in different]


class SortedTexts:
    """Length reward that sorts the completions to batch them, and returns the scores in that order."""

    def __call__(self, *, completions: Sequence[Text], **columns: Any) -> list[float]:
        return [-len(text) / 100 for text in sorted((completion_text(text) for text in completions), key=len)]


class LogprobsShifted(HfGenerator):
    """The generator hf, whose log-probabilities are one token late."""

    provides = ("logprobs",)

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            logprobs = rollout.sampler_logprobs or ()
            yield replace(rollout, sampler_logprobs=(logprobs[0], *logprobs[:-1]))
