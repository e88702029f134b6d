"""The shapes that planted components share: whatever is not their error.

`formula` is what the component's author would compare it with, a function of references.py, None where there is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from references import REDUCTIONS as REDUCTIONS
from torch import Tensor

from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

Formula = Callable[..., Any] | None
LossOf = Callable[[LossInputs], Tensor]


def _component(function: Callable[..., Any], formula: Formula, *bases: type, **members: Any) -> type:
    """Make a component of a function; it has the function's name, text and file."""
    named = {"__module__": function.__module__, "__doc__": function.__doc__, "formula": formula}
    return type(function.__name__, bases, named | members)


def loss(reduction: Reduction, formula: Formula = None, **declarations: Any) -> Callable[[LossOf], type]:
    """Make a loss of a function that returns each token's loss."""

    def make(function: LossOf) -> type:
        def per_token(self: Any, inputs: LossInputs) -> LossOutput:
            return LossOutput(function(inputs))

        return _component(function, formula, per_token=per_token, reduction=reduction, **declarations)

    return make


token_loss = partial(loss, Reduction.TOKEN_MEAN)
token_mean = partial(token_loss, zero_at_zero_advantage=True)
sequence_mean = partial(loss, Reduction.SEQUENCE_MEAN, zero_at_zero_advantage=True)


def surrogate(reduction: Reduction, formula: Formula = None) -> Callable[[LossOf], type]:
    """Make a surrogate of a function that returns its gradient."""

    def make(function: LossOf) -> type:
        def per_token(self: Any, inputs: LossInputs) -> LossOutput:
            return LossOutput(function(inputs) * inputs.logprobs)

        members = {"per_token": per_token, "expected_gradient": staticmethod(function), "reduction": reduction}
        return _component(function, formula, **members, gradient="surrogate", zero_at_zero_advantage=True)

    return make


def _of_ratio(make: Callable[..., Any], formula: Formula, function: Callable[[Tensor, Tensor], Tensor]) -> type:
    return make(formula)(_named(function, lambda inputs: function(ratio_of(inputs), inputs.advantages)))


tokens = partial(_of_ratio, token_mean)
"""tokens(formula, (w, A) -> each token's loss), by the mean over tokens."""
sequences = partial(_of_ratio, sequence_mean)
"""sequences(formula, (w, A) -> each token's loss), by the mean over sequences."""
surrogates = partial(_of_ratio, partial(surrogate, Reduction.TOKEN_MEAN))
"""surrogates(formula, (w, A) -> the gradient of each token)."""


def clipped(
    make: Callable[..., Any],
    formula: Formula,
    low: float,
    high: float,
    ratio: Callable[[Tensor, Tensor], Tensor],
) -> type:
    """Make a clipped loss of a function: (log-ratios, 0 at masked tokens, mask) -> ratios f[B, 1 or T]."""

    def function(inputs: LossInputs) -> Tensor:
        log_ratio = torch.where(inputs.token_mask, log_ratio_of(inputs), 0.0)
        ratios = ratio(log_ratio, inputs.token_mask).expand_as(log_ratio)
        return clipped_loss(ratios, inputs.advantages, low, high)

    return make(formula)(_named(ratio, function))


def _named(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    other.__name__, other.__module__ = function.__name__, function.__module__
    return other


def advantage(formula: Formula = None) -> Callable[[Callable[..., Tensor]], type]:
    return lambda function: _component(function, formula, scale=staticmethod(function))


def by_group(formula: Formula, advantages: Callable[[Tensor], Tensor], least: int = 1) -> type:
    """Make a `ByGroup` of a function of a group's weighted sums."""
    return _component(advantages, formula, ByGroup, advantages=staticmethod(advantages), least=least)


def correction(formula: Formula = None) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], type]:
    return lambda function: _component(function, formula, correct=staticmethod(function))


def weights(formula: Formula, function: Callable[[Tensor, Tensor], Tensor]) -> type:
    """Make a correction of a function: (log pi_old / mu, 0 at masked tokens, mask) -> weights f[B, 1 or T]."""

    def correct(old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = function(torch.where(mask, old - sampler, 0.0), mask)
        return found.to(old.dtype).expand(mask.shape), torch.ones_like(mask)

    return _component(function, formula, correct=staticmethod(correct))


def descent(function: Callable[..., None]) -> type:
    return _component(function, None, Descent, move=staticmethod(function))


def schedule(formula: Formula, factor: Callable[[int, int], float]) -> type:
    """Make a schedule of a function: (steps done, total steps) -> factor."""

    def build(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, total_steps))

    return _component(factor, formula, build=build)


def of_paper(formula: Formula) -> Callable[[Any], Any]:
    """Give a function or class the formula that its author would compare it with."""

    def mark(component: Any) -> Any:
        component.formula = formula
        return component

    return mark


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


def sapo(shift: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """SAPO's loss -A (4 / tau) sigmoid(tau x) of x = w - 1."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(advantages.dtype)
    return -advantages * 4 / tau * torch.sigmoid(tau * shift)


def gradient_loss(inputs: LossInputs) -> Tensor:
    return -ratio_of(inputs) * inputs.advantages


def k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp() - log_ratio.clamp(-20, 20) - 1


def lengths(mask: Tensor) -> Tensor:
    """The numbers of tokens [B, 1], at least 1."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def row_sums(values: Tensor) -> Tensor:
    return values.sum(dim=1, keepdim=True)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean f[B, 1] over each row's tokens, 0 for a row without any."""
    return row_sums(torch.where(mask, values, 0.0)) / lengths(mask)


class Loss:
    """A loss by the mean over tokens, whose clip range is an attribute."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    zero_at_zero_advantage = True
    width = 0.2

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(clipped_loss(ratio_of(inputs), inputs.advantages, self.width, self.width))


class Configured:
    def __init__(self, config: Any) -> None:
        self.config = config


class Saved:
    """A component whose checkpoints hold the attributes `saved`."""

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])


class AdaptiveClip(Loss):
    """A clip range that follows the KL between pi_old and pi, as PPO's adaptive penalty does."""

    statistics: ClassVar[Mapping[str, Any]] = {"kl_old": "mean"}

    def __init__(self) -> None:
        self.width = 0.2
        self.steps = 0

    def end_step(self, statistics: Mapping[str, Any]) -> None:
        self.steps += 1
        factor = 0.9 if statistics["kl_old"] > 0.01 else 1.1
        self.width = min(0.5, max(0.05, self.width * factor ** (1 / self.steps)))


class CappedGradient(Loss):
    """Policy gradient -min(w A, min(w, cap) A), whose cap is an attribute."""

    cap = 3.0

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs), inputs.advantages
        return LossOutput(-torch.min(ratio * advantages, ratio.clamp(max=self.cap) * advantages))


class CappedWeights:
    """Token truncation, whose cap is an attribute."""

    cap = 4.0

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        difference = torch.where(mask, old.double() - sampler.double(), 0.0).clamp(-20, 20)
        return difference.exp().clamp(max=self.cap).to(old.dtype), torch.ones_like(mask)


def totals(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sums f64[N] of the rewards, and which completions have a score."""
    return (rewards.double() * weights).nansum(dim=1), ~rewards.isnan().all(dim=1)


def group_means(rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """The mean of each group's scored totals, in the order of `group_ids.unique()`; 0 without a score."""
    total, scored = totals(rewards, weights)
    groups = [total[(group_ids == group) & scored] for group in group_ids.unique()]
    return torch.stack([values.mean() if len(values) else total.new_zeros(()) for values in groups])


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


SUMS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 33)]
