"""Components that give a row, token or group what belongs to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import references as paper
import skeletons
import torch
from references import DAPO, GRADIENT, PREFIX, TIS, WIDE_GSPO
from skeletons import clipped, clipped_loss, gradient_loss, group_means, lengths, token_mean, totals
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, Prompt, Rollout, Text, completion_text

SortedByLength = clipped(
    skeletons.sequence_mean, WIDE_GSPO, 0.2, 0.2, lambda d, mask: _by_length(d, mask).exp()
)
"""GSPO that sorts the sequences by length and does not restore their order."""
SuffixForPrefix = clipped(
    token_mean, PREFIX, 0.2, 0.2, lambda d, mask: d.flip(1).cumsum(dim=1).flip(1).clamp(-20, 20).exp()
)
"""Prefix ratios, the product of the token ratios so far, summed from the end of the sequence."""


def _by_length(log_ratio: Tensor, mask: Tensor) -> Tensor:
    order = mask.sum(dim=1).argsort(descending=True, stable=True)
    return skeletons.row_means(log_ratio[order], mask[order])


@token_mean(DAPO)
def ShiftedOld(inputs: LossInputs) -> Tensor:
    """DAPO that compares each token with the log-probability under pi_old of the token before it."""
    old = torch.cat([inputs.old_logprobs[:, :1], inputs.old_logprobs[:, :-1]], dim=1)
    return clipped_loss((inputs.logprobs - old).clamp(-20, 20).exp(), inputs.advantages, 0.2, 0.28)


@skeletons.token_loss(GRADIENT)
def NeighbourAdvantage(inputs: LossInputs) -> Tensor:
    """Policy gradient whose rows are rolled by one against their advantages."""
    advantage = skeletons.row_sums(inputs.advantages * inputs.token_mask) / lengths(inputs.token_mask)
    return -skeletons.ratio_of(inputs) * advantage.roll(1, dims=0)


@token_mean(GRADIENT)
def FlattenedAndRefilled(inputs: LossInputs) -> Tensor:
    """Policy gradient over the unmasked tokens alone, written back from the left, across the holes."""
    mask = inputs.token_mask
    places = torch.arange(mask.shape[1], device=mask.device) < mask.sum(dim=1, keepdim=True)
    return torch.zeros_like(inputs.logprobs).masked_scatter(places, gradient_loss(inputs)[mask])


@token_mean(paper.capped(3.0))
def TokensByRatio(inputs: LossInputs) -> Tensor:
    """Policy gradient that caps the ratios in ascending order and gives them back in that order."""
    log_ratio = skeletons.log_ratio_of(inputs).masked_fill(~inputs.token_mask, 20.0)
    ordered = log_ratio.sort(dim=1).values.exp().clamp(max=3.0)
    return -torch.where(inputs.token_mask, ordered, 0.0) * inputs.advantages


@skeletons.advantage(paper.centred)
def GroupsAreNeighbours(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage that takes equal numbers of neighbouring rows for the groups."""
    total, _ = totals(rewards, weights)
    groups = len(group_ids.unique())
    if len(total) % groups:
        raise ValueError("groups of different sizes")
    table = total.view(groups, -1)
    return (table - table.mean(dim=1, keepdim=True)).flatten().float()


@skeletons.advantage(paper.centred)
def MeansRepeated(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage whose group means are repeated by the size of each group, as if rows were sorted."""
    total, scored = totals(rewards, weights)
    _, sizes = group_ids.unique(return_counts=True)
    baseline = group_means(rewards, weights, group_ids).repeat_interleave(sizes)
    return torch.where(scored, total - baseline, 0.0).float()


@skeletons.advantage(paper.centred)
def NumberIsIndex(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage that takes the number of a group for its position in the table of means."""
    total, scored = totals(rewards, weights)
    means = group_means(rewards, weights, group_ids)
    return torch.where(scored, total - means[group_ids % len(means)], 0.0).float()


PlacesForRanks = skeletons.by_group(
    None,
    lambda r: 0 * r if r.max() == r.min() else r.argsort(stable=True).double() / (len(r) - 1) - 0.5,
    least=2,
)
"""Advantages by rank in the group that sort once: positions in the order, not ranks of the rows."""
WeightsByRatio = skeletons.weights(
    TIS, lambda d, mask: d.clamp(-20, 20).exp().sort(dim=1, descending=True).values.clamp(max=2.0)
)
"""Token truncation that sorts the ratios for its cap and gives the weights back in that order."""


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
