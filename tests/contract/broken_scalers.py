"""Advantages and corrections that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs


class Right:
    """r - mean_g, 0 without a score."""

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total = (rewards.nan_to_num(nan=0.0) * weights).sum(1)
        scored = ~rewards.isnan().all(1)
        names, groups = torch.unique(group_ids, return_inverse=True)
        zeros = total.new_zeros(len(names))
        counts = zeros.index_add(0, groups, scored.float())
        sums = zeros.index_add(0, groups, torch.where(scored, total, torch.zeros_like(total)))
        deviations = total - (sums / counts.clamp(min=1))[groups]
        return torch.where(scored, deviations, torch.zeros_like(total))


class OfInputs(Right):
    """The same in the form of one argument."""

    def scale(self, inputs: AdvantageInputs) -> Tensor:  # type: ignore[override]
        return super().scale(inputs.rewards, inputs.weights, inputs.group_ids)


class OfTurns(OfInputs):
    """A completion's advantage for each of its turns, but 0 without a score."""

    per = "turn"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:  # type: ignore[override]
        advantages = super().scale(inputs)
        return [a.expand(len(turns)) for a, turns in zip(advantages, inputs.turns, strict=True)]


class OfTokens(OfInputs):
    """A completion's advantage for each of its tokens."""

    per = "token"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:  # type: ignore[override]
        lengths = inputs.lengths.tolist()
        return [a.expand(length) for a, length in zip(super().scale(inputs), lengths, strict=True)]


class TurnsAsSums(OfInputs):
    """Short episodes are better, and it says that it reads sums alone."""

    signal = "sum"

    def scale(self, inputs: AdvantageInputs) -> Tensor:  # type: ignore[override]
        shorter = torch.tensor([[-0.1 * len(turns)] for turns in inputs.turns])
        return Right.scale(self, inputs.rewards + shorter, inputs.weights, inputs.group_ids)


class EnlargesRounding(OfInputs):
    """The deviations of equal rewards are rounding errors, divided by next to nothing."""

    def scale(self, inputs: AdvantageInputs) -> Tensor:  # type: ignore[override]
        return super().scale(inputs) / (inputs.rewards.std() + 1e-4)


class OneForAllTurns(OfTurns):
    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:  # type: ignore[override]
        return [advantages[:1] for advantages in super().scale(inputs)]


def changed(change: Callable[[Callable[..., Any], Tensor, Tensor, Tensor], Any], **declarations: Any) -> type:
    """Make a scaler of a function of the right one and its arguments."""

    def scale(self: Right, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Any:
        return change(partial(Right.scale, self), rewards, weights, group_ids)

    return type("Changed", (Right,), {"scale": scale, "__module__": __name__, **declarations})


OneNumber = changed(lambda right, *given: right(*given).mean())
ScalesInPlace = changed(lambda right, rewards, *others: right(rewards.mul_(2), *others))
DeclaredWrongSign = changed(lambda right, *given: -right(*given), monotone=False)
Distance = changed(lambda right, *given: right(*given).abs())  # from the mean, without a sign
OnlyZeros = changed(lambda right, *given: 0 * right(*given))
# Only tells weights of 0 from others.
EqualWeights = changed(lambda right, rewards, weights, groups: right(rewards, (weights != 0).float(), groups))


class RightCorrection:
    """min(pi_old / mu, 2)"""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp((old - sampler).clamp(max=20)).clamp(max=2.0), mask


class WeightsAlone(RightCorrection):
    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().correct(old, sampler, mask)[0]  # type: ignore[return-value]


class CarriesGradient(RightCorrection):
    def __init__(self) -> None:
        self.scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights, keep = super().correct(old, sampler, mask)
        return weights * self.scale, keep


class ChangesSampler(RightCorrection):
    """Behind the version counter, at which a run looks."""

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        sampler.data.sub_(0.1)
        return super().correct(old, sampler, mask)


class NeverOne(RightCorrection):
    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights, keep = super().correct(old, sampler, mask)
        return 0.9 * weights, keep


class Overflows(RightCorrection):
    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp((old - sampler).sum(1, keepdim=True)).expand_as(old), mask


class NeedsAToken(RightCorrection):
    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        assert (old - sampler)[mask].max() < 100
        return super().correct(old, sampler, mask)


class OfTheirDevice(Right):
    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total = (rewards.nan_to_num(nan=0.0) * weights).sum(1)
        scored = ~rewards.isnan().all(1)
        same = (group_ids.unsqueeze(0) == group_ids.unsqueeze(1)) & scored
        means = (same * total).sum(1) / same.sum(1).clamp(min=1)
        return torch.where(scored, total - means, 0.0)


class DeclaredInverted(RightCorrection):
    monotone = False

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().correct(sampler, old, mask)
