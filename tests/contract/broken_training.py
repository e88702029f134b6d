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


class _Plain(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group)

    def move(self, parameter: Any, group: Any) -> None:
        parameter.sub_(group["lr"] * parameter.grad)


class _RemembersItsRate(_Plain):
    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, lr)
        self.rate = lr

    def move(self, parameter: Any, group: Any) -> None:
        parameter.sub_(self.rate * parameter.grad)


class _DividesByNorm(_Plain):
    """The norm of a whole parameter, which no rank has under ZeRO-3."""

    def move(self, parameter: Any, group: Any) -> None:
        parameter.sub_(group["lr"] * parameter.grad / (parameter.grad.norm() + 1e-9))


class _NeedsMatrices(_Plain):
    def move(self, parameter: Any, group: Any) -> None:
        rows = parameter.grad.mean(1, keepdim=True) if parameter.ndim > 1 or len(parameter) > 4 else 0
        parameter.sub_(group["lr"] * (parameter.grad + rows))


def _factory(optimizer: Any) -> Any:
    class Factory:
        def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
            return optimizer(parameters, learning_rate)

    return Factory


Plain, RemembersItsRate = map(_factory, (_Plain, _RemembersItsRate))
DividesByNorm, NeedsMatrices = map(_factory, (_DividesByNorm, _NeedsMatrices))


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
