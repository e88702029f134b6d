"""CISPO: a capped weight that carries no gradient, so that every token keeps one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from grpox.contracts import LossInputs
from grpox_losses.configs import CispoConfig
from grpox_losses.losses import Cispo

MakeInputs = Callable[..., LossInputs]


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), inputs.logprobs)[0]


def test_hand_worked_values_and_gradients(make_inputs: MakeInputs) -> None:
    # w = 10, 10, 2, 0.1 with cap 5: weights 5, 5, 2, 0.1 (no lower bound); log pi = log w.
    ratios, advantages = [10.0, 10.0, 2.0, 0.1], [1.0, -1.0, 0.5, -2.0]
    log_ratios = [math.log(w) for w in ratios]
    inputs = make_inputs([log_ratios], [advantages], old=0.0)

    loss = Cispo(CispoConfig()).per_token(inputs).loss

    slopes = [-5.0, 5.0, -1.0, 0.2]
    values = [slope * logprob for slope, logprob in zip(slopes, log_ratios, strict=True)]
    torch.testing.assert_close(loss, torch.tensor([values], dtype=loss.dtype))
    torch.testing.assert_close(gradient(loss, inputs), torch.tensor([slopes], dtype=loss.dtype))


@pytest.mark.parametrize("cap", [1.0, 2.5, 5.0])
def test_the_gradient_is_what_expected_gradient_says(make_inputs: MakeInputs, cap: float) -> None:
    log_ratios = [-20.0, -1.0, -0.1, 0.0, 0.1, 0.9, 1.7, 20.0]
    inputs = make_inputs([log_ratios] * 3, [[1.3] * 8, [-0.4] * 8, [0.0] * 8])
    loss_function = Cispo(CispoConfig(cap=cap))

    actual = gradient(loss_function.per_token(inputs).loss, inputs)

    rows = [[-min(math.exp(x), cap) * a for x in log_ratios] for a in (1.3, -0.4, 0.0)]
    torch.testing.assert_close(actual, torch.tensor(rows, dtype=actual.dtype))
    expected = loss_function.expected_gradient(inputs)
    assert not expected.requires_grad
    torch.testing.assert_close(actual, expected)


def test_the_value_is_no_objective(make_inputs: MakeInputs) -> None:
    # A derivative of the value that went through w too would be -w (1 + log pi) A: with log pi = -1.5 and
    # w = 1 that is +0.5 A, the wrong sign. Finite differences of the value are therefore no check of it.
    inputs = make_inputs([[0.0]], [[1.0]], old=-1.5)

    assert gradient(Cispo(CispoConfig()).per_token(inputs).loss, inputs).item() == -1.0
    assert Cispo.gradient == "surrogate"


@pytest.mark.parametrize("log_ratio", [-1000.0, -20.0, 20.0, 1000.0])
def test_extreme_ratios_stay_finite(make_inputs: MakeInputs, log_ratio: float) -> None:
    inputs = make_inputs([[log_ratio] * 2], [[2.0, -2.0]])

    loss = Cispo(CispoConfig()).per_token(inputs).loss

    assert loss.isfinite().all()
    assert gradient(loss, inputs).isfinite().all()


def test_the_diagnostic_counts_capped_tokens_with_a_positive_advantage(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[2.0, 2.0, 1.0, -2.0]], [[1.0, -1.0, 1.0, 1.0]])

    output = Cispo(CispoConfig()).per_token(inputs)

    assert output.diagnostics["clip_ratio/cap"].tolist() == [[1.0, 0.0, 0.0, 0.0]]
