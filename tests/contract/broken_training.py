"""Datasets, optimizers and schedules, right ones and such as break their contract in one way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import datasets
import torch


class RightOptimizer:
    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=learning_rate)


class OwnRate(RightOptimizer):
    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        return super().build(parameters, 1e-3)


class _Steps(torch.optim.Optimizer):
    """Moves each parameter by (gradient, learning rate now, at first) -> step."""

    def __init__(self, parameters: Iterable[Any], lr: float, step_of: Callable[..., Any]) -> None:
        super().__init__(parameters, {"lr": lr})
        self.first, self.step_of = lr, step_of

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.step_of(parameter.grad, group["lr"], self.first))


def steps(step_of: Callable[..., Any]) -> type:
    def build(self: Any, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        return _Steps(parameters, learning_rate, step_of)

    return type("Steps", (), {"build": build, "__module__": __name__})


Plain = steps(lambda gradient, lr, first: lr * gradient)
RemembersItsRate = steps(lambda gradient, lr, first: first * gradient)
# The norm of a whole parameter, which no rank has under ZeRO-3.
DividesByNorm = steps(lambda gradient, lr, first: lr * gradient / (gradient.norm() + 1e-9))
NeedsMatrices = steps(lambda gradient, lr, first: lr * (gradient + _row_means(gradient)))


def _row_means(gradient: Any) -> Any:
    return gradient.mean(1, keepdim=True) if gradient.ndim > 1 or len(gradient) > 4 else 0


class DeclaredNorm(DividesByNorm):  # type: ignore[misc, valid-type]
    elementwise = False


class RightSchedule:
    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, total_steps))

    def factor(self, step: int, total_steps: int) -> float:
        return max(0.0, 1 - step / total_steps)


def schedule(factor: Callable[[int, int], float]) -> type:
    return type("Changed", (RightSchedule,), {"factor": staticmethod(factor), "__module__": __name__})


BelowZero = schedule(lambda step, total_steps: 1 - 2 * step / total_steps)
AlwaysZero = schedule(lambda step, total_steps: 0.0)
AboveTheRate = schedule(lambda step, total_steps: 2.0)
EndsEarly = schedule(lambda step, total_steps: ([1.0] * (total_steps // 2))[step])


class FirstGroupOnly(RightSchedule):
    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        factors = [lambda step: self.factor(step, total_steps)]
        factors += [lambda step: 1.0] * (len(optimizer.param_groups) - 1)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


def data(load: Callable[[datasets.Dataset], Any] = lambda rows: rows) -> type:
    """Make a dataset of what a function returns for the right rows."""
    members = {"load": lambda self: load(datasets.Dataset.from_list(ROWS)), "__module__": __name__}
    return type("Data", (), members)


RightData = data()
Stream = data(lambda rows: rows.to_iterable_dataset())
AList = data(lambda rows: ROWS)
NoRows = data(lambda rows: rows.select([]))
NoPrompts = data(lambda rows: rows.rename_column("prompt", "question"))
EmptyPrompt = data(lambda rows: datasets.Dataset.from_list([*ROWS, {"prompt": "", "answer": ""}]))
TakesAnArgumentsName = data(lambda rows: rows.rename_column("answer", "completions"))
# Depends on the rank, as what is seeded by the process does.
OfItsProcess = data(lambda rows: rows.shuffle(seed=int(os.environ.get("RANK", "0"))))
