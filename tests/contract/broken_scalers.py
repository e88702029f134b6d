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


def of_inputs(change: Callable[..., Any] = lambda found, inputs: found, **members: Any) -> type:
    """Make an advantage in the form of one argument, of a change to the right one."""

    def scale(self: Any, inputs: AdvantageInputs) -> Any:
        return change(Right().scale(inputs.rewards, inputs.weights, inputs.group_ids), inputs)

    return type("OfInputs", (), {"scale": scale, "__module__": __name__, **members})


OfInputs = of_inputs()
OfTurns = of_inputs(
    lambda found, inputs: [a.expand(len(turns)) for a, turns in zip(found, inputs.turns, strict=True)],
    per="turn",
)
OfTokens = of_inputs(
    lambda found, inputs: [a.expand(n) for a, n in zip(found, inputs.lengths.tolist(), strict=True)],
    per="token",
)
OneForAllTurns = of_inputs(lambda found, inputs: list(found[:, None]), per="turn")
# The deviations of equal rewards are rounding errors, divided by next to nothing.
EnlargesRounding = of_inputs(lambda found, inputs: found / (inputs.rewards.std() + 1e-4))


class TurnsAsSums:
    """Short episodes are better, and it says that it reads sums alone."""

    signal = "sum"

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        shorter = torch.tensor([[-0.1 * len(turns)] for turns in inputs.turns])
        return Right().scale(inputs.rewards + shorter, inputs.weights, inputs.group_ids)


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


def changed_correction(
    change: Callable[[Tensor, Tensor, Tensor, Tensor], Any], prepare: Callable[[Tensor], object] = id
) -> type:
    """Make a correction of a change: (right weights, keep, old, sampler) -> what is returned."""

    def correct(self: RightCorrection, old: Tensor, sampler: Tensor, mask: Tensor) -> Any:
        prepare(sampler)
        return change(*RightCorrection.correct(self, old, sampler, mask), old, sampler)

    return type("Changed", (RightCorrection,), {"correct": correct, "__module__": __name__})


SCALE = torch.ones((), dtype=torch.float64, requires_grad=True)
WeightsAlone = changed_correction(lambda weights, keep, old, sampler: weights)
CarriesGradient = changed_correction(lambda weights, keep, old, sampler: (weights * SCALE, keep))
NeverOne = changed_correction(lambda weights, keep, old, sampler: (0.9 * weights, keep))
Overflows = changed_correction(
    lambda weights, keep, old, sampler: ((old - sampler).sum(1, keepdim=True).exp().expand_as(old), keep)
)
NeedsAToken = changed_correction(
    lambda weights, keep, old, sampler: (weights * ((old - sampler)[keep].max() < 100), keep)
)
# Behind the version counter, at which a run looks.
ChangesSampler = changed_correction(
    lambda weights, keep, old, sampler: (weights, keep), lambda sampler: sampler.data.sub_(0.1)
)


class DeclaredInverted(RightCorrection):
    monotone = False

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().correct(sampler, old, mask)


class OfTheirDevice(Right):
    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total = (rewards.nan_to_num(nan=0.0) * weights).sum(1)
        scored = ~rewards.isnan().all(1)
        same = (group_ids.unsqueeze(0) == group_ids.unsqueeze(1)) & scored
        means = (same * total).sum(1) / same.sum(1).clamp(min=1)
        return torch.where(scored, total - means, 0.0)
