"""The shapes that planted components share: whatever is not their error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class TokenMean:
    """A loss by the mean over tokens."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    zero_at_zero_advantage = True


class SequenceMean:
    """A loss by the mean over sequences."""

    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_MEAN
    zero_at_zero_advantage = True


def _component(function: Callable[..., Any], *bases: type, **members: Any) -> type:
    """Make a component of a function; it has the function's name, text and file."""
    named = {"__module__": function.__module__, "__doc__": function.__doc__}
    return type(function.__name__, bases, named | members)


def loss(reduction: Reduction, **declarations: Any) -> Callable[[Callable[[LossInputs], Tensor]], type]:
    """Make a loss of a function that returns each token's loss."""

    def make(function: Callable[[LossInputs], Tensor]) -> type:
        def per_token(self: Any, inputs: LossInputs) -> LossOutput:
            return LossOutput(function(inputs))

        return _component(function, per_token=per_token, reduction=reduction, **declarations)

    return make


token_mean = loss(Reduction.TOKEN_MEAN, zero_at_zero_advantage=True)
sequence_mean = loss(Reduction.SEQUENCE_MEAN, zero_at_zero_advantage=True)


def surrogate(reduction: Reduction) -> Callable[[Callable[[LossInputs], Tensor]], type]:
    """Make a surrogate of a function that returns its gradient."""

    def make(function: Callable[[LossInputs], Tensor]) -> type:
        def per_token(self: Any, inputs: LossInputs) -> LossOutput:
            return LossOutput(function(inputs) * inputs.logprobs)

        members = {"per_token": per_token, "expected_gradient": staticmethod(function), "reduction": reduction}
        return _component(function, **members, gradient="surrogate", zero_at_zero_advantage=True)

    return make


def advantage(function: Callable[..., Tensor]) -> type:
    return _component(function, scale=staticmethod(function))


def by_group(least: int = 1) -> Callable[[Callable[[Tensor], Tensor]], type]:
    """Make a `ByGroup` of a function of a group's weighted sums."""
    return lambda function: _component(function, ByGroup, advantages=staticmethod(function), least=least)


def correction(function: Callable[..., tuple[Tensor, Tensor]]) -> type:
    return _component(function, correct=staticmethod(function))


def descent(function: Callable[..., None]) -> type:
    return _component(function, Descent, move=staticmethod(function))


def schedule(factor: Callable[[int, int], float]) -> type:
    """Make a schedule of a function: (steps done, total steps) -> factor."""

    def build(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, total_steps))

    return _component(factor, build=build)


class Hf(HfGenerator):
    """The generator hf."""

    provides = ("logprobs",)

    def __init__(self) -> None:
        super().__init__(HfConfig())


def log_ratio_of(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20)


def ratio_of(inputs: LossInputs) -> Tensor:
    return log_ratio_of(inputs).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


class AdaptiveClip(TokenMean):
    """A clip range that follows the KL between pi_old and pi, as PPO's adaptive penalty does."""

    statistics: ClassVar[Mapping[str, Any]] = {"kl_old": "mean"}

    def __init__(self) -> None:
        self.width = 0.2
        self.steps = 0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, self.width, self.width))

    def end_step(self, statistics: Mapping[str, Any]) -> None:
        self.steps += 1
        factor = 0.9 if statistics["kl_old"] > 0.01 else 1.1
        self.width = min(0.5, max(0.05, self.width * factor ** (1 / self.steps)))


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
