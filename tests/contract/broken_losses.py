"""Losses that break the contract, each in one way; named after the check that is meant for it."""

from __future__ import annotations

from typing import ClassVar

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


class Remembers(Right):
    calls = 0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.calls += 1
        return LossOutput(super().per_token(inputs).loss * (1 + self.calls))


class ChangesInputs(Right):
    """Behind the version counter, at which a run looks."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        inputs.advantages.data.mul_(0.5)
        return super().per_token(inputs)


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


class SurrogateOfNothing(HiddenGradient):
    gradient = "surrogate"


class SurrogateOfAnother(HiddenGradient):
    gradient = "surrogate"

    def expected_gradient(self, inputs: LossInputs) -> torch.Tensor:
        return -inputs.advantages


class ZeroOnlySaid(Right):
    zero_at_zero_advantage = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss + inputs.logprobs)


class CountsPadding(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        log_ratio = (inputs.logprobs - inputs.old_logprobs).mean(1, keepdim=True)
        return LossOutput(-torch.exp(log_ratio) * inputs.advantages)


class LooksAtNeighbours(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        before = torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1]], dim=1)
        return LossOutput(-ratio * before * inputs.advantages)


class DividesByItsCount(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss / inputs.token_mask.sum().clamp(min=1))


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


class AbsoluteAdvantage(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(super().per_token(inputs).loss * inputs.advantages.sign())


class ClipsOtherSide(Right):
    """The larger of both branches where the smaller one is meant."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        clipped = ratio.clamp(0.8, 1.2)
        return LossOutput(-torch.max(ratio * inputs.advantages, clipped * inputs.advantages))


class OfTheCpu(Right):
    """Fails on a GPU."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        weights = torch.linspace(1, 2, inputs.logprobs.shape[1]).to(inputs.logprobs.dtype)
        return LossOutput(super().per_token(inputs).loss * weights)


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
