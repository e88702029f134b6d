"""Components that take a token or score into account which they should not, or leave one out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from skeletons import ByGroup, SequenceMean, TokenMean, clipped_loss, log_ratio_of, ratio_of, totals
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import LossInputs, LossOutput, Prompt, Rollout, Text, completion_text
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class RatioOfPadding(SequenceMean):
    """Sequence ratio by the mean of the token ratios, where masked tokens add their ratio 1."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        lengths = inputs.token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        ratio = (ratio_of(inputs).sum(dim=1, keepdim=True) / lengths).expand_as(inputs.logprobs)
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))


class ZeroIsPadding(SequenceMean):
    """GSPO that takes log-probability 0 for padding; a token of probability 1 has it too."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        mask = inputs.logprobs != 0
        log_ratio = torch.where(mask, log_ratio_of(inputs), 0.0)
        mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return LossOutput(clipped_loss(mean.exp().expand_as(log_ratio), inputs.advantages, 0.2, 0.2))


class LastColumn(TokenMean):
    """Policy gradient that weighs a sequence by the ratio of its last token, read from the last column."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = ratio_of(inputs)
        return LossOutput(-ratio * ratio[:, -1:].detach().clamp(max=2.0).expand_as(ratio) * inputs.advantages)


class NoHoles(SequenceMean):
    """GSPO that counts tokens and takes the first so many, though masked tokens may stand between them."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        lengths = inputs.token_mask.sum(dim=1, keepdim=True)
        positions = torch.arange(inputs.token_mask.shape[1], device=lengths.device)
        log_ratio = torch.where(positions < lengths, log_ratio_of(inputs), 0.0)
        ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)).exp().expand_as(log_ratio)
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))


class PrefixByPosition(TokenMean):
    """Prefix ratios, each the mean of the log-ratios so far, divided by the position, masked ones counted."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = log_ratio_of(inputs)
        positions = torch.arange(1, log_ratio.shape[1] + 1, device=log_ratio.device)
        ratio = (log_ratio.cumsum(dim=1) / positions).exp()
        return LossOutput(clipped_loss(ratio, inputs.advantages, 0.2, 0.2))


class LargestOfAll(TokenMean):
    """Policy gradient whose ratios are divided by the largest of the sequence; a masked token's is 1."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = ratio_of(inputs)
        return LossOutput(-ratio / ratio.detach().amax(dim=1, keepdim=True) * inputs.advantages)


class FirstColumnSkipped(TokenMean):
    """DAPO that leaves the first column out, as if log-probabilities were still to be shifted."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        loss = clipped_loss(ratio_of(inputs), inputs.advantages, 0.2, 0.28)
        return LossOutput(torch.cat([torch.zeros_like(loss[:, :1]), loss[:, 1:]], dim=1))


class AbstainedIsZero(ByGroup):
    """Dr. GRPO's advantage that takes an abstention for reward 0, in the mean and as a score."""

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards.double().nan_to_num(nan=0.0) * weights).sum(dim=1)
        return total, torch.ones_like(total).bool()


class AnyAbstentionDrops(ByGroup):
    """Dr. GRPO's advantage that leaves a completion out when any one function abstained."""

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (rewards.double() * weights).sum(dim=1)
        return total, ~total.isnan()


class UnscoredInTheMean:
    """Dr. GRPO's advantage whose group mean counts completions without a score in its divisor."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = totals(rewards, weights)
        result = torch.zeros_like(total)
        for group in group_ids.unique():
            rows = group_ids == group
            result[rows] = torch.where(scored[rows], total[rows] - total[rows].mean(), 0.0)
        return result.float()


class SumsPadding:
    """Sequence truncation that sums the log-ratios of all positions, whatever the mask says."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        total = (old - sampler).double().sum(dim=1, keepdim=True)
        return total.clamp(-20, 20).exp().clamp(max=2.0).expand(mask.shape).to(old.dtype), torch.ones_like(mask)


class WorstOfTheWidth:
    """Sequence mask by the worst token ratio, which takes the position of a hole for a token of ratio 0."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.where(mask, (old - sampler).clamp(-20, 20).exp(), 0.0)
        keep = (ratio.amin(dim=1, keepdim=True) >= 0.1).expand(mask.shape)
        return torch.where(keep & mask, ratio, 0.0), keep


class EmptySkipped:
    """Exact match that skips empty completions, and so returns fewer scores."""

    def __call__(self, *, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
        texts = [completion_text(text).strip() for text in completions]
        return [float(text == str(each)) for text, each in zip(texts, answer, strict=True) if text]


class NoAnswerIsWrong:
    """Exact match that scores 0 where the row has no answer, in place of abstaining."""

    def __call__(self, *, completions: Sequence[Text], answer: Sequence[Any], **columns: Any) -> list[float]:
        return [
            float(completion_text(text).strip() == str(each))
            for text, each in zip(completions, answer, strict=True)
        ]


class EndCut(HfGenerator):
    """The generator hf, which drops the token that ends a completion, as decoded texts do."""

    provides = ("logprobs",)

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            if rollout.finish_reason == "stop" and len(rollout.completion_ids) > 1:
                logprobs = (rollout.sampler_logprobs or ())[:-1]
                yield replace(rollout, completion_ids=rollout.completion_ids[:-1], sampler_logprobs=logprobs)
            else:
                yield rollout
