"""The device that the kit imitates where a machine has no GPU: what it refuses, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from grpox.testing.devices import device_problem

TABLE = torch.ones(3)
CPU = torch.device("cpu")
FROM_HERE = "of the CPU"


@torch.jit.script
def scripted(values: Tensor) -> Tensor:
    return values * 2 + torch.zeros_like(values)


def with_a_row_of_the_cpu(values: Tensor) -> Tensor:
    table = values.new_zeros(2, 3)
    table[0] = TABLE
    return table


def moved_for_nothing(values: Tensor) -> Tensor:
    other = torch.ones(3)
    other.to(values.device)
    return values * other


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_parameter_can_be_moved() -> None:
    result = device_problem(lambda move: [move(torch.nn.Parameter(torch.ones(3))) * 2])
    assert result == ("", "on a device that is imitated")


@pytest.mark.parametrize(
    "compute",
    [
        lambda values: values * torch.ones(3).to(values),
        lambda values: torch.tensor(values.tolist(), device=values.device) + values,
        lambda values: torch.from_numpy(values.to(CPU).numpy()).to(values.device) * values,
        lambda values: scripted(values) * values,
        lambda values: torch.func.grad(lambda each: (each**2).sum())(values) + values,
        lambda values: torch.func.vmap(lambda each: each * 2)(values),
        lambda values: values[torch.arange(3)],
        with_a_row_of_the_cpu,
    ],
)
def test_what_a_gpu_takes_passes(compute: Callable[[Tensor], Tensor]) -> None:
    assert device_problem(lambda move: [compute(move(TABLE))]) == ("", "on a device that is imitated")


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda values: values * TABLE, FROM_HERE),
        (lambda values: values * torch.ones(3, device=CPU), FROM_HERE),
        (lambda values: values * torch.from_numpy(np.ones(3)), FROM_HERE),
        (lambda values: values * torch.einsum("i,i->i", TABLE, TABLE), FROM_HERE),
        (lambda values: values.to(CPU), FROM_HERE),
        (lambda values: torch.empty(3).copy_(values), FROM_HERE),
        (lambda values: torch.as_tensor(np.exp(values)), "numpy"),
        (moved_for_nothing, FROM_HERE),
    ],
)
def test_what_a_gpu_refuses_is_refused(compute: Callable[[Tensor], Tensor], words: str) -> None:
    problem, _ = device_problem(lambda move: [compute(move(TABLE))])
    assert words in problem
