"""Components that take a token or score into account which they should not, or leave one out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import skeletons
import torch
from skeletons import clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, Prompt, Rollout, Text, completion_text


@skeletons.sequence_mean
def RatioOfPadding(inputs: LossInputs) -> Tensor:
    """Sequence ratio by the mean of the token ratios, where masked tokens add their ratio 1."""
    lengths = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (ratio_of(inputs).sum(dim=1, keepdim=True) / lengths).expand_as(inputs.logprobs)
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.2)


@skeletons.sequence_mean
def ZeroIsPadding(inputs: LossInputs) -> Tensor:
    """GSPO that takes log-probability 0 for padding; a token of probability 1 has it too."""
    mask = inputs.logprobs != 0
    log_ratio = torch.where(mask, log_ratio_of(inputs), 0.0)
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return clipped_loss(mean.exp().expand_as(log_ratio), inputs.advantages, 0.2, 0.2)


@skeletons.token_mean
def LastColumn(inputs: LossInputs) -> Tensor:
    """Policy gradient that weighs a sequence by the ratio of its last token, read from the last column."""
    ratio = ratio_of(inputs)
    return -ratio * ratio[:, -1:].detach().clamp(max=2.0).expand_as(ratio) * inputs.advantages


@skeletons.sequence_mean
def NoHoles(inputs: LossInputs) -> Tensor:
    """GSPO that counts tokens and takes the first so many, though masked tokens may stand between them."""
    lengths = inputs.token_mask.sum(dim=1, keepdim=True)
    positions = torch.arange(inputs.token_mask.shape[1], device=lengths.device)
    log_ratio = torch.where(positions < lengths, log_ratio_of(inputs), 0.0)
    ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)).exp().expand_as(log_ratio)
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.2)


@skeletons.token_mean
def PrefixByPosition(inputs: LossInputs) -> Tensor:
    """Prefix ratios, each the mean of the log-ratios so far, divided by the position, masked ones counted."""
    log_ratio = log_ratio_of(inputs)
    positions = torch.arange(1, log_ratio.shape[1] + 1, device=log_ratio.device)
    ratio = (log_ratio.cumsum(dim=1) / positions).exp()
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.2)


@skeletons.token_mean
def LargestOfAll(inputs: LossInputs) -> Tensor:
    """Policy gradient whose ratios are divided by the largest of the sequence; a masked token's is 1."""
    ratio = ratio_of(inputs)
    return -ratio / ratio.detach().amax(dim=1, keepdim=True) * inputs.advantages


@skeletons.token_mean
def FirstColumnSkipped(inputs: LossInputs) -> Tensor:
    """DAPO that leaves the first column out, as if log-probabilities were still to be shifted."""
    loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
    return torch.cat([torch.zeros_like(loss[:, :1]), loss[:, 1:]], dim=1)


class AbstainedIsZero(skeletons.ByGroup):
    """Dr. GRPO's advantage that takes an abstention for reward 0, in the mean and as a score."""

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards.double().nan_to_num(nan=0.0) * weights).sum(dim=1)
        return total, torch.ones_like(total).bool()


class AnyAbstentionDrops(skeletons.ByGroup):
    """Dr. GRPO's advantage that leaves a completion out when any one function abstained."""

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards.double() * weights).sum(dim=1)
        return total, ~total.isnan()


@skeletons.advantage
def UnscoredInTheMean(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage whose group mean counts completions without a score in its divisor."""
    total, scored = totals(rewards, weights)
    result = torch.zeros_like(total)
    for group in group_ids.unique():
        rows = group_ids == group
        result[rows] = torch.where(scored[rows], total[rows] - total[rows].mean(), 0.0)
    return result.float()


@skeletons.correction
def SumsPadding(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence truncation that sums the log-ratios of all positions, whatever the mask says."""
    total = (old - sampler).double().sum(dim=1, keepdim=True)
    return total.clamp(-20, 20).exp().clamp(max=2.0).expand(mask.shape).to(old.dtype), torch.ones_like(mask)


@skeletons.correction
def WorstOfTheWidth(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence mask by the worst token ratio, which takes the position of a hole for a token of ratio 0."""
    ratio = torch.where(mask, (old - sampler).clamp(-20, 20).exp(), 0.0)
    keep = (ratio.amin(dim=1, keepdim=True) >= 0.1).expand(mask.shape)
    return torch.where(keep & mask, ratio, 0.0), keep


def EmptySkipped(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Exact match that skips empty completions, and so returns fewer scores."""
    texts = [completion_text(text).strip() for text in completions]
    return [float(text == str(each)) for text, each in zip(texts, answer, strict=True) if text]


def NoAnswerIsWrong(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Exact match that scores 0 where the row has no answer, in place of abstaining."""
    return [
        float(completion_text(text).strip() == str(each))
        for text, each in zip(completions, answer, strict=True)
    ]


class EndCut(skeletons.Hf):
    """The generator hf, which drops the token that ends a completion, as decoded texts do."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            if rollout.finish_reason == "stop" and len(rollout.completion_ids) > 1:
                logprobs = (rollout.sampler_logprobs or ())[:-1]
                yield replace(rollout, completion_ids=rollout.completion_ids[:-1], sampler_logprobs=logprobs)
            else:
                yield rollout
