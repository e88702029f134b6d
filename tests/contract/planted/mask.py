"""Components that take a token or score into account which they should not, or leave one out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import references as paper
import skeletons
import torch
from references import DAPO, SEQUENCE_TIS, WIDE_GSPO
from skeletons import clipped_loss, lengths, log_ratio_of, row_sums, sequence_mean, token_mean, totals
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, Prompt, Rollout, Text, completion_text


@sequence_mean()
def RatioOfPadding(inputs: LossInputs) -> Tensor:
    """Sequence ratio by the mean of the token ratios, where masked tokens add their ratio 1."""
    ratio = row_sums(skeletons.ratio_of(inputs)) / lengths(inputs.token_mask)
    return clipped_loss(ratio.expand_as(inputs.logprobs), inputs.advantages, 0.2, 0.2)


@sequence_mean(WIDE_GSPO)
def NoHoles(inputs: LossInputs) -> Tensor:
    """GSPO that counts tokens and takes the first so many, though masked tokens may stand between them."""
    positions = torch.arange(inputs.token_mask.shape[1], device=inputs.token_mask.device)
    first = torch.where(positions < row_sums(inputs.token_mask), log_ratio_of(inputs), 0.0)
    ratio = (row_sums(first) / lengths(inputs.token_mask)).exp().expand_as(first)
    return clipped_loss(ratio, inputs.advantages, 0.2, 0.2)


@sequence_mean(WIDE_GSPO)
def ZeroIsPadding(inputs: LossInputs) -> Tensor:
    """GSPO that takes log-probability 0 for padding; a token of probability 1 has it too."""
    ratio = skeletons.row_means(log_ratio_of(inputs), inputs.logprobs != 0).exp()
    return clipped_loss(ratio.expand_as(inputs.logprobs), inputs.advantages, 0.2, 0.2)


@token_mean()
def PrefixByPosition(inputs: LossInputs) -> Tensor:
    """Prefix ratios, each the mean of the log-ratios so far, divided by the position, masked ones counted."""
    log_ratio = log_ratio_of(inputs)
    positions = torch.arange(1, log_ratio.shape[1] + 1, device=log_ratio.device)
    return clipped_loss((log_ratio.cumsum(dim=1) / positions).exp(), inputs.advantages, 0.2, 0.2)


LastColumn = skeletons.tokens(None, lambda w, a: -w * w[:, -1:].detach().clamp(max=2.0).expand_as(w) * a)
"""Policy gradient that weighs a sequence by the ratio of its last token, read from the last column."""
LargestOfAll = skeletons.tokens(None, lambda w, a: -w / w.detach().amax(dim=1, keepdim=True) * a)
"""Policy gradient whose ratios are divided by the largest of the sequence; a masked token's is 1."""


@token_mean(DAPO)
def FirstColumnSkipped(inputs: LossInputs) -> Tensor:
    """DAPO that leaves the first column out, as if log-probabilities were still to be shifted."""
    loss = clipped_loss(skeletons.ratio_of(inputs), inputs.advantages, 0.2, 0.28)
    return torch.cat([torch.zeros_like(loss[:, :1]), loss[:, 1:]], dim=1)


class AbstainedIsZero(skeletons.ByGroup):
    """Dr. GRPO's advantage that takes an abstention for reward 0, in the mean and as a score."""

    formula = paper.centred

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards.double().nan_to_num(nan=0.0) * weights).sum(dim=1)
        return total, torch.ones_like(total).bool()


class AnyAbstentionDrops(skeletons.ByGroup):
    """Dr. GRPO's advantage that leaves a completion out when any one function abstained."""

    formula = paper.centred

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards.double() * weights).sum(dim=1)
        return total, ~total.isnan()


@skeletons.advantage(paper.centred)
def UnscoredInTheMean(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Dr. GRPO's advantage whose group mean counts completions without a score in its divisor."""
    total, scored = totals(rewards, weights)
    result = torch.zeros_like(total)
    for group in group_ids.unique():
        rows = group_ids == group
        result[rows] = torch.where(scored[rows], total[rows] - total[rows].mean(), 0.0)
    return result.float()


@skeletons.correction(SEQUENCE_TIS)
def SumsPadding(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence truncation that sums the log-ratios of all positions, whatever the mask says."""
    weights = row_sums((old - sampler).double()).clamp(-20, 20).exp().clamp(max=2.0)
    return weights.expand(mask.shape).to(old.dtype), torch.ones_like(mask)


@skeletons.correction()
def WorstOfTheWidth(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence mask by the worst token ratio, which takes the position of a hole for a token of ratio 0."""
    ratio = torch.where(mask, (old - sampler).clamp(-20, 20).exp(), 0.0)
    keep = (ratio.amin(dim=1, keepdim=True) >= 0.1).expand(mask.shape)
    return torch.where(keep & mask, ratio, 0.0), keep


@skeletons.of_paper(paper.exact)
def EmptySkipped(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Exact match that skips empty completions, and so returns fewer scores."""
    texts = [completion_text(text).strip() for text in completions]
    return [float(text == str(each)) for text, each in zip(texts, answer, strict=True) if text]


def NoAnswerIsWrong(*, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Exact match that scores 0 where the row has no answer, in place of abstaining."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion_text(text).strip() == str(each)) for text, each in pairs]


class EndCut(skeletons.Hf):
    """The generator hf, which drops the token that ends a completion, as decoded texts do."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            if rollout.finish_reason == "stop" and len(rollout.completion_ids) > 1:
                logprobs = (rollout.sampler_logprobs or ())[:-1]
                yield replace(rollout, completion_ids=rollout.completion_ids[:-1], sampler_logprobs=logprobs)
            else:
                yield rollout
