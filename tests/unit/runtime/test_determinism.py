"""`train.deterministic`: what it sets, what it refuses, and that a CPU computes the same bits with it."""

from __future__ import annotations

import os

import pytest
import torch
from support.problems import problem_of
from torch import Tensor

from grpox.errors import RunFailed
from grpox.runtime.determinism import (
    FLASH,
    WORKSPACE,
    check_determinism,
    deterministic_algorithms,
    prepare_determinism,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def gradient() -> Tensor:
    """The gradient of an embedding whose rows are used many times, through operations that add by index."""
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=numbers, requires_grad=True)
    rows = torch.randint(7, (400,), generator=numbers)
    taken = torch.nn.functional.embedding(rows, weight).index_select(0, torch.randperm(400, generator=numbers))
    sums = torch.zeros(9, 5).index_add(0, torch.randint(9, (400,), generator=numbers), taken.exp())
    sums.square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_on_a_cpu_the_same_bits_come_out() -> None:
    plain = gradient()
    with deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ[FLASH] == "1"
        # A buffer whose padding were NaN would make the norm of DeepSpeed's gradients NaN.
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert torch.equal(gradient(), plain)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert FLASH not in os.environ


def test_an_operation_without_a_fixed_order_ends_the_run_by_name_and_other_errors_stay() -> None:
    told = r"train\.deterministic .* put_ does not"
    with pytest.raises(RunFailed, match=told), deterministic_algorithms():
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="shape"), deterministic_algorithms():
        torch.zeros(3).view(2, 2)


@pytest.mark.parametrize(
    ("before", "after"), [("", ":4096:8"), (":4096:8", ":4096:8"), (":16:8", ":16:8"), (":0:0", "")]
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_cublas_gets_a_workspace_unless_it_has_one_or_it_is_too_late(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str, has_begun: bool
) -> None:
    """Torch reads the variable once, so setting it after CUDA has begun may change nothing."""
    monkeypatch.setenv(WORKSPACE, before)
    if not before:
        monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_begun)
    if after and (before or not has_begun):
        prepare_determinism()
        assert os.environ[WORKSPACE] == after
        return
    problem = problem_of(prepare_determinism)
    given = before or "not set"
    assert (problem.key, problem.given, problem.allowed) == (WORKSPACE, given, ":4096:8 or :16:8")
    assert os.environ.get(WORKSPACE, "") == before


def test_an_engine_of_its_own_on_a_gpu_is_refused_and_others_are_not() -> None:
    for has_own_numerics, device in ((True, CPU), (False, GPU), (False, CPU)):
        check_determinism("any", has_own_numerics, device)
    problem = problem_of(check_determinism, "vllm-colocate", True, GPU)
    assert (problem.key, "vllm-colocate" in str(problem)) == ("train.deterministic", True)
