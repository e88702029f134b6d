"""Losses that break the contract, each in one way; named after the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction


def ratio_of(inputs: LossInputs) -> Tensor:
    return torch.exp(inputs.logprobs - inputs.old_logprobs)


class Right:
    """-w A: nothing is wrong with it."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = ratio_of(inputs)
        return LossOutput(-ratio * inputs.advantages, {"mine/ratio": ratio})


def changed(change: Callable[[Tensor, LossInputs], Tensor], **declarations: Any) -> type:
    """Make a loss of a change to `Right`'s."""

    def per_token(self: Right, inputs: LossInputs) -> LossOutput:
        return LossOutput(change(Right.per_token(self, inputs).loss, inputs))

    return type("Changed", (Right,), {"per_token": per_token, "__module__": __name__, **declarations})


def of_the_first(loss: Tensor, inputs: LossInputs) -> Tensor:
    first = torch.zeros_like(inputs.advantages)
    first[0] = 1
    return loss * first


def on_their_device(loss: Tensor, inputs: LossInputs) -> Tensor:
    one = torch.ones(1, dtype=inputs.logprobs.dtype, device=inputs.logprobs.device)
    two = torch.tensor([1.0, 1.0], dtype=inputs.logprobs.dtype, device=inputs.logprobs.device)
    scale = torch.tensor(1.0, dtype=inputs.logprobs.dtype)  # a number, which any device takes
    rows = torch.arange(len(inputs.logprobs))  # an index may be of the CPU
    return loss[rows] * one * two.mean() * scale * inputs.advantages.new_tensor([1.0]).mean().item()


def by_row(loss: Tensor, inputs: LossInputs) -> Tensor:
    return loss * torch.tensor(inputs.columns["difficulty"]).to(inputs.logprobs)[:, None]  # type: ignore[index]


def of_sequences(loss: Tensor, inputs: LossInputs) -> Tensor:
    log_ratio = ((inputs.logprobs - inputs.old_logprobs) * inputs.token_mask).sum(1, keepdim=True)
    ratio = torch.exp(log_ratio / inputs.token_mask.sum(1, keepdim=True).clamp(min=1))
    return -ratio * inputs.advantages


def less_entropy(loss: Tensor, inputs: LossInputs) -> Tensor:
    return loss - 0.01 * inputs.entropy  # type: ignore[operator]


NeedsUndeclared = changed(less_entropy)
OneNumber = changed(lambda loss, inputs: loss.mean())
OfOneDtype = changed(lambda loss, inputs: loss * torch.ones(1, dtype=torch.float64))
DrawsNumbers = changed(lambda loss, inputs: loss + 0 * torch.rand(1, dtype=loss.dtype))
HiddenGradient = changed(lambda loss, inputs: -ratio_of(inputs).detach() * inputs.advantages * inputs.logprobs)
ZeroOnlySaid = changed(lambda loss, inputs: loss + inputs.logprobs, zero_at_zero_advantage=True)
MixesRows = changed(
    lambda loss, inputs: -ratio_of(inputs) * (inputs.advantages - inputs.advantages.mean(0, keepdim=True))
)
NeedsAToken = changed(lambda loss, inputs: loss + 0 * inputs.logprobs[inputs.token_mask].detach().max())
Overflows = changed(lambda loss, inputs: -(ratio_of(inputs) ** 8) * inputs.advantages)
LosesDigits = changed(lambda loss, inputs: -((ratio_of(inputs) + 1000) - 1000) * inputs.advantages)
FirstSequenceOnly = changed(of_the_first, mixes_rows=True)  # found by the permutation, and by the split
WrongSign = changed(lambda loss, inputs: -loss)
OtherSign = changed(lambda loss, inputs: -loss, sign="other")
PositiveOnly = changed(lambda loss, inputs: loss * (inputs.advantages > 0))
AnyDevice = changed(on_their_device)
EntropyWithoutGradient = changed(less_entropy, needs=("entropy",))
EntropyAsConstant = changed(less_entropy, needs=("entropy",), entropy_as_constant=True)
EntropyWithGradient = changed(less_entropy, needs=("entropy_gradient",))
HiddenEntropyGradient = changed(
    lambda loss, inputs: loss - 0.01 * inputs.entropy * inputs.entropy.detach(),  # type: ignore[operator, union-attr]
    needs=("entropy_gradient",),
)
ZeroButForEntropy = changed(less_entropy, needs=("entropy_gradient",), zero_at_zero_advantage=True)
NeedsRewards = changed(lambda loss, inputs: -inputs.rewards[:, :1] * inputs.logprobs)  # type: ignore[index]
NeedsColumns = changed(lambda loss, inputs: loss * len(inputs.columns))  # type: ignore[arg-type]
OwnColumns = changed(
    by_row,
    needs=("columns", "sequence_ids", "reference_logprobs", "sampler_logprobs"),
    example_columns={"difficulty": [0.5, 2.0, 1.0]},
)
SequenceOnlySaid = changed(lambda loss, inputs: loss, level="sequence")
TokenOnlySaid = changed(of_sequences, level="token")
MisspeltNeed = changed(lambda loss, inputs: loss, needs=("entropi",))
SCALE = torch.ones((), dtype=torch.float64, requires_grad=True)
TrainsItself = changed(lambda loss, inputs: loss * SCALE.to(loss.dtype))
NotANumber = changed(lambda loss, inputs: loss * float("nan"))


class SurrogateOfAnother(HiddenGradient):  # type: ignore[misc, valid-type]
    gradient = "surrogate"

    def expected_gradient(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages


class AveragesDiagnostics(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        output = super().per_token(inputs)
        ratio = output.diagnostics["mine/ratio"].mean()
        return LossOutput(output.loss, {"mine/ratio": ratio.expand_as(output.loss)})


class RemembersTheLargest(Right):
    """The same twice in a row, and another after a larger batch."""

    largest = 1

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.largest = max(self.largest, inputs.logprobs.shape[1])
        return LossOutput(super().per_token(inputs).loss * self.largest)


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


class MisspeltStatistic(Right):
    statistics: ClassVar[dict[str, str]] = {"ratoi": "mean"}

    def end_step(self, statistics: dict[str, Any]) -> None: ...
