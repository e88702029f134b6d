"""Losses that break the contract, each in one way; named after the check that is meant for it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from grpox.contracts import LossInputs, LossOutput, Reduction


class Right:
    """-w A: nothing is wrong with it."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        return LossOutput(-ratio * inputs.advantages, {"mine/ratio": ratio})


class NeedsUndeclared(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss - 0.01 * inputs.entropy)  # type: ignore[operator]


class OneNumber(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss.mean())


class OfOneDtype(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss * torch.ones(1, dtype=torch.float64))


class DrawsNumbers(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        torch.rand(1)
        return super().per_token(inputs)


class TrainsItself(Right):
    def __init__(self) -> None:
        self.scale = torch.ones((), requires_grad=True)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        scale = self.scale.to(inputs.logprobs.dtype)
        return LossOutput(super().per_token(inputs).loss * scale)


class HiddenGradient(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs).detach()
        return LossOutput(-ratio * inputs.advantages * inputs.logprobs)


class SurrogateOfAnother(HiddenGradient):
    gradient = "surrogate"

    def expected_gradient(self, inputs: LossInputs) -> torch.Tensor:
        return -inputs.advantages


class ZeroOnlySaid(Right):
    zero_at_zero_advantage = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss + inputs.logprobs)


class MixesRows(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        advantages = inputs.advantages - inputs.advantages.mean(0, keepdim=True)
        return LossOutput(-torch.exp(inputs.logprobs - inputs.old_logprobs) * advantages)


class NeedsAToken(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        largest = inputs.logprobs[inputs.token_mask].detach().max()
        return LossOutput(super().per_token(inputs).loss + 0 * largest)


class Overflows(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-torch.exp(8 * (inputs.logprobs - inputs.old_logprobs)) * inputs.advantages)


class LosesDigits(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        return LossOutput(-((ratio + 1000) - 1000) * inputs.advantages)


class AveragesDiagnostics(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        output = super().per_token(inputs)
        ratio = output.diagnostics["mine/ratio"].mean()
        return LossOutput(output.loss, {"mine/ratio": ratio.expand_as(output.loss)})


class FirstSequenceOnly(Right):
    """The place in the batch decides: told by the permutation, and by the split."""

    mixes_rows = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        first = torch.zeros_like(inputs.advantages)
        first[0] = 1
        return LossOutput(super().per_token(inputs).loss * first)


class WrongSign(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-super().per_token(inputs).loss)


class OtherSign(WrongSign):
    sign = "other"


class PositiveOnly(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss * (inputs.advantages > 0))


class OfTheirDevice(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        one = torch.ones(1, dtype=inputs.logprobs.dtype, device=inputs.logprobs.device)
        two = torch.tensor([1.0, 1.0], dtype=inputs.logprobs.dtype, device=inputs.logprobs.device)
        scale = torch.tensor(1.0, dtype=inputs.logprobs.dtype)  # a number, which any device takes
        rows = torch.arange(len(inputs.logprobs))  # an index may be of the CPU
        mean = inputs.advantages.new_tensor([1.0]).mean().item()
        return LossOutput(super().per_token(inputs).loss[rows] * one * two.mean() * scale * mean)


class RemembersTheLargest(Right):
    """The same twice in a row, and another after a larger batch."""

    largest = 1

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.largest = max(self.largest, inputs.logprobs.shape[1])
        return LossOutput(super().per_token(inputs).loss * self.largest)


class EntropyWithoutGradient(Right):
    needs = ("entropy",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss - 0.01 * inputs.entropy)  # type: ignore[operator]


class EntropyAsConstant(EntropyWithoutGradient):
    """Right: it says that the entropy is a constant."""

    entropy_as_constant = True


class EntropyWithGradient(EntropyWithoutGradient):
    """Right: it is given a gradient."""

    needs = ("entropy_gradient",)


class HiddenEntropyGradient(EntropyWithGradient):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None
        loss = super(EntropyWithoutGradient, self).per_token(inputs).loss
        return LossOutput(loss - 0.01 * inputs.entropy * inputs.entropy.detach())


class ZeroButForEntropy(EntropyWithGradient):
    zero_at_zero_advantage = True


class NeedsRewards(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.rewards is not None
        return LossOutput(-inputs.rewards[:, :1] * inputs.logprobs)


class NeedsColumns(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.columns is not None
        return super().per_token(inputs)


class OwnColumns(Right):
    """Right: the suite gives it the columns that it names."""

    needs = ("columns", "sequence_ids", "reference_logprobs", "sampler_logprobs")
    example_columns: ClassVar = {"difficulty": [0.5, 2.0, 1.0]}

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.columns is not None
        weights = torch.tensor(inputs.columns["difficulty"]).to(inputs.logprobs)
        return LossOutput(super().per_token(inputs).loss * weights[:, None])


class OfGroups(Right):
    """Right: the mean over a group, of whole groups."""

    scope = "group"
    needs = ("group_ids",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        assert inputs.group_ids is not None
        same = (inputs.group_ids[:, None] == inputs.group_ids[None]).to(inputs.logprobs.dtype)
        log_ratio = ((inputs.logprobs - inputs.old_logprobs) * inputs.token_mask).sum(1)
        tokens = inputs.token_mask.sum(1).to(same.dtype)
        mean = (same @ log_ratio) / (same @ tokens).clamp(min=1)
        return LossOutput(-torch.exp(mean)[:, None] * inputs.advantages)


class OfPartedGroups(OfGroups):
    scope = "token"


class OfNamelessGroups(OfGroups):
    needs = ()


class GroupsByPlace(OfGroups):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        loss = super().per_token(inputs).loss
        weights = 1.0 + (torch.arange(len(loss)) < 2).to(loss.dtype)
        return LossOutput(loss * weights[:, None])


class SequenceOnlySaid(Right):
    level = "sequence"


class TokenOnlySaid(Right):
    level = "token"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = ((inputs.logprobs - inputs.old_logprobs) * inputs.token_mask).sum(1, keepdim=True)
        ratio = torch.exp(log_ratio / inputs.token_mask.sum(1, keepdim=True).clamp(min=1))
        return LossOutput(-ratio * inputs.advantages)


class MisspeltNeed(Right):
    needs = ("entropi",)


class MisspeltStatistic(Right):
    statistics: ClassVar[dict[str, str]] = {"ratoi": "mean"}

    def end_step(self, statistics: dict[str, Any]) -> None: ...


class NotANumber(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss * float("nan"))
