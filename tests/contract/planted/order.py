"""Components that give a row, token or group what belongs to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import skeletons
import torch
from skeletons import clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, Prompt, Reduction, Rollout, Text, completion_text


@skeletons.sequence_mean
def SortedByLength(inputs: LossInputs) -> Tensor:
    """GSPO that sorts the sequences by length and does not restore their order."""
    lengths = inputs.token_mask.sum(dim=1)
    order = lengths.argsort(descending=True, stable=True)
    log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)[order]
    mean = log_ratio.sum(dim=1, keepdim=True) / lengths[order].clamp(min=1).unsqueeze(1)
    return clipped_loss(mean.exp().expand_as(log_ratio), inputs.advantages, 0.2, 0.2)


@skeletons.token_mean
def ShiftedOld(inputs: LossInputs) -> Tensor:
    """DAPO that compares each token with the log-probability under pi_old of the token before it."""
    old = torch.cat([inputs.old_logprobs[:, :1], inputs.old_logprobs[:, :-1]], dim=1)
    ratio = (inputs.logprobs - old).clamp(-20, 20).exp()
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.28)


@skeletons.token_mean
def SuffixForPrefix(inputs: LossInputs) -> Tensor:
    """Prefix ratios, the product of the token ratios so far, summed from the end of the sequence."""
    log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
    ratio = log_ratio.flip(1).cumsum(dim=1).flip(1).clamp(-20, 20).exp()
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.2)


@skeletons.loss(Reduction.TOKEN_MEAN)
def NeighbourAdvantage(inputs: LossInputs) -> Tensor:
    """Policy gradient whose rows are rolled by one against their advantages."""
    lengths = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    advantage = (inputs.advantages * inputs.token_mask).sum(dim=1, keepdim=True) / lengths
    return -ratio_of(inputs) * advantage.roll(1, dims=0)


@skeletons.token_mean
def FlattenedAndRefilled(inputs: LossInputs) -> Tensor:
    """Policy gradient over the unmasked tokens alone, written back from the left, across the holes."""
    mask = inputs.token_mask
    values = (-ratio_of(inputs) * inputs.advantages)[mask]
    loss = torch.zeros_like(inputs.logprobs)
    places = torch.arange(mask.shape[1], device=mask.device) < mask.sum(dim=1, keepdim=True)
    return loss.masked_scatter(places, values)


@skeletons.token_mean
def TokensByRatio(inputs: LossInputs) -> Tensor:
    """Policy gradient that caps the ratios in ascending order and gives them back in that order."""
    log_ratio = log_ratio_of(inputs).masked_fill(~inputs.token_mask, 20.0)
    ordered = log_ratio.sort(dim=1).values.exp().clamp(max=3.0)
    return -torch.where(inputs.token_mask, ordered, 0.0) * inputs.advantages


@skeletons.advantage
def GroupsAreNeighbours(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage that takes equal numbers of neighbouring rows for the groups."""
    total, _ = totals(rewards, weights)
    groups = len(group_ids.unique())
    if len(total) % groups:
        raise ValueError("groups of different sizes")
    table = total.view(groups, -1)
    return (table - table.mean(dim=1, keepdim=True)).flatten().float()


@skeletons.advantage
def MeansRepeated(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage whose group means are repeated by the size of each group, as if rows were sorted."""
    total, scored = totals(rewards, weights)
    means, sizes = [], []
    for group in group_ids.unique():
        rows = (group_ids == group) & scored
        means.append(total[rows].mean() if rows.any() else total.new_zeros(()))
        sizes.append(int((group_ids == group).sum()))
    baseline = torch.stack(means).repeat_interleave(torch.tensor(sizes, device=total.device))
    return torch.where(scored, total - baseline, 0.0).float()


@skeletons.by_group(2)
def PlacesForRanks(values: Tensor) -> Tensor:
    """Advantages by rank in the group that sort once: positions in the order, not ranks of the rows."""
    if values.max() == values.min():
        return 0 * values
    return values.argsort(stable=True).double() / (len(values) - 1) - 0.5


@skeletons.advantage
def NumberIsIndex(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage that takes the number of a group for its position in the table of means."""
    total, scored = totals(rewards, weights)
    means = []
    for group in group_ids.unique():
        rows = (group_ids == group) & scored
        means.append(total[rows].mean() if rows.any() else total.new_zeros(()))
    baseline = torch.stack(means)[group_ids % len(means)]
    return torch.where(scored, total - baseline, 0.0).float()


@skeletons.correction
def WeightsByRatio(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Token truncation that sorts the ratios for its cap and gives the weights back in that order."""
    ratio = torch.where(mask, old - sampler, 0.0).clamp(-20, 20).exp()
    return ratio.sort(dim=1, descending=True).values.clamp(max=2.0), torch.ones_like(mask)


def EqualsOnce(*, completions: Sequence[Text], **columns: Any) -> list[float]:
    """Judge that asks once for equal completions and returns the scores of the different ones."""
    different = dict.fromkeys(completion_text(text) for text in completions)
    return [float(len(text) < 5) for text in different]


def SortedTexts(*, completions: Sequence[Text], **columns: Any) -> list[float]:
    """Length reward that sorts the completions to batch them, and returns the scores in that order."""
    return [-len(text) / 100 for text in sorted((completion_text(text) for text in completions), key=len)]


class LogprobsShifted(skeletons.Hf):
    """The generator hf, whose log-probabilities are one token late."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            logprobs = rollout.sampler_logprobs or ()
            yield replace(rollout, sampler_logprobs=(logprobs[0], *logprobs[:-1]))
