"""The shapes that planted components share: whatever is not their error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpox.contracts import LossInputs, Reduction


class TokenMean:
    """A loss by the mean over tokens."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    zero_at_zero_advantage = True


class SequenceMean:
    """A loss by the mean over sequences."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage = True


def log_ratio_of(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20)


def ratio_of(inputs: LossInputs) -> Tensor:
    return log_ratio_of(inputs).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def totals(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sums f64[N] of the rewards, and which completions have a score."""
    return (rewards.double() * weights).nansum(dim=1), ~rewards.isnan().all(dim=1)


class ByGroup:
    """Advantages of each group from the weighted sums of its rewards, 0 for one of fewer than `least`."""

    least: ClassVar[int] = 1

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        total, scored = self.totals(rewards, weights)
        result = torch.zeros_like(total)
        for group in group_ids.unique():
            rows = (group_ids == group) & scored
            if int(rows.sum()) >= self.least and self.differ(total[rows]):
                result[rows] = self.advantages(total[rows])
        return result.float()

    def totals(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return totals(rewards, weights)

    def differ(self, values: Tensor) -> bool:
        return True

    def advantages(self, values: Tensor) -> Tensor:
        return values - values.mean()


class Descent:
    """An optimizer that moves each parameter by itself; by default down its gradient."""

    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        return Steps(parameters, learning_rate, self)

    def move(self, parameter: Any, group: Any, state: dict[str, Any]) -> None:
        parameter.add_(parameter.grad, alpha=-group["lr"])


class Steps(torch.optim.Optimizer):
    """The steps of a `Descent`."""

    def __init__(self, parameters: Iterable[Any], lr: float, factory: Descent) -> None:
        super().__init__(parameters, {"lr": lr})
        self.factory = factory

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.factory.move(parameter, group, self.state[parameter])
