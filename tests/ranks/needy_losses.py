"""Losses that need more than every loss is given, for the steps of `loss_input_steps` and their test."""

from __future__ import annotations

from typing import ClassVar

import torch

from grpox.contracts import LossInputs, LossOutput, Reduction

COEFFICIENT = 0.1


class Plain:
    """-w A."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages)


class ReferenceKl(Plain):
    """-w A + c (exp(rho) - rho - 1), rho = log ref - log pi."""

    needs = ("reference_logprobs",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.reference_logprobs is not None
        rho = inputs.reference_logprobs - inputs.logprobs
        return LossOutput(super().per_token(inputs).loss + COEFFICIENT * (torch.exp(rho) - rho - 1))


class EntropyRegularised(Plain):
    """-w A - c H."""

    needs = ("entropy_gradient",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        return LossOutput(super().per_token(inputs).loss - COEFFICIENT * inputs.entropy)


class RewardWeighted(Plain):
    """-(r_1 + 2 r_2) log pi."""

    needs = ("rewards",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.rewards is not None
        reward = inputs.rewards[:, :1] + 2 * inputs.rewards[:, 1:]
        return LossOutput(-reward * inputs.logprobs)


class Pairwise:
    """For each pair of a group the softplus of s_worse - s_better, s the mean log-probability of a sequence.

    The loss of a pair lies on the better sequence, spread over its tokens.
    """

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SUM
    scope = "group"
    needs = ("group_ids", "rewards", "sequence_ids")

    def __init__(self) -> None:
        self.sizes: list[tuple[list[int], bool]] = []
        """The sizes of the groups of each call, and true for a filler."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ids, rewards = inputs.group_ids, inputs.rewards
        assert ids is not None
        assert rewards is not None
        self.sizes.append((ids.unique(return_counts=True)[1].tolist(), bool((ids < 0).all())))
        mask = inputs.token_mask.to(inputs.logprobs.dtype)
        tokens = mask.sum(1).clamp(min=1)
        score = (inputs.logprobs * mask).sum(1) / tokens
        better = (ids[:, None] == ids[None]) & (rewards[:, None, 0] > rewards[None, :, 0])
        of_pair = torch.nn.functional.softplus(score[None] - score[:, None])
        of_sequence = torch.where(better, of_pair, 0.0).sum(1)
        return LossOutput((of_sequence / tokens)[:, None] * mask)
