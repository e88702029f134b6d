"""SAPO: a sigmoid gate whose slope is the unclipped surrogate's at w = 1 and fades on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from grpox.contracts import LossInputs
from grpox_losses.configs import SapoConfig
from grpox_losses.losses import Sapo

MakeInputs = Callable[..., LossInputs]


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), inputs.logprobs)[0]


def reference(log_ratio: float, advantage: float, tau: float) -> tuple[float, float]:
    """Value and slope in log pi, the gate written as a tanh: 4 s(x) = 2 + 2 tanh(x/2), 4 s' = 1 - tanh^2."""
    w = math.exp(log_ratio)
    bend = math.tanh(tau * (w - 1) / 2)
    return -advantage * (2 + 2 * bend) / tau, -advantage * (1 - bend**2) * w


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (0.5, 3.0)])
@pytest.mark.parametrize("advantage", [1.4, -0.6, 0.0])
def test_value_and_slope_agree_with_the_reference(
    make_inputs: MakeInputs, tau_pos: float, tau_neg: float, advantage: float
) -> None:
    log_ratios = [-20.0, -2.0, -0.3, 0.0, 0.2, 0.7, 1.6, 20.0]
    inputs = make_inputs([log_ratios], [[advantage] * 8])

    loss = Sapo(SapoConfig(tau_pos=tau_pos, tau_neg=tau_neg)).per_token(inputs).loss

    tau = tau_pos if advantage > 0 else tau_neg
    expected = [reference(x, advantage, tau) for x in log_ratios]
    values, slopes = (torch.tensor([column], dtype=loss.dtype) for column in zip(*expected, strict=True))
    torch.testing.assert_close(loss, values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(loss, inputs), slopes, rtol=1e-4, atol=1e-6)


def test_on_policy_the_value_is_minus_two_a_over_tau_and_the_slope_minus_a(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[0.0, 0.0, 0.0]], [[0.9, -0.9, 0.0]])

    loss = Sapo(SapoConfig()).per_token(inputs).loss

    expected = torch.tensor([[-2 * 0.9 / 1.0, 2 * 0.9 / 1.05, 0.0]], dtype=loss.dtype)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, inputs), -inputs.advantages)


def test_hand_worked_number(make_inputs: MakeInputs) -> None:
    # A = 1, tau = 1, w = 2: -4 sigmoid(1) = -4 * 0.7310586; slope in log pi -4 * 0.1966119 * 2.
    inputs = make_inputs([[math.log(2)]], [[1.0]], old=0.0)

    loss = Sapo(SapoConfig()).per_token(inputs).loss

    assert loss.item() == pytest.approx(-2.9242343, rel=1e-6)
    assert gradient(loss, inputs).item() == pytest.approx(-1.5728955, rel=1e-6)


def test_a_zero_advantage_gives_zero_value_and_zero_gradient(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[-1.0, 0.0, 1.0]], [[0.0] * 3])

    loss = Sapo(SapoConfig()).per_token(inputs).loss

    assert not loss.any()
    assert not gradient(loss, inputs).any()


@pytest.mark.parametrize("log_ratio", [-1000.0, -20.0, 20.0, 1000.0])
def test_extreme_ratios_stay_finite(make_inputs: MakeInputs, log_ratio: float) -> None:
    inputs = make_inputs([[log_ratio] * 2], [[2.0, -2.0]])

    loss = Sapo(SapoConfig()).per_token(inputs).loss

    assert loss.isfinite().all()
    assert gradient(loss, inputs).isfinite().all()


def test_the_gate_diagnostic_is_the_slope_in_w_over_the_unclipped_one(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[0.0, 0.4, -0.8]], [[1.0, -2.0, 0.5]])

    output = Sapo(SapoConfig()).per_token(inputs)

    gate = output.diagnostics["sapo/gate"]
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    torch.testing.assert_close(gradient(output.loss, inputs), -inputs.advantages * ratio * gate)
    assert gate[0, 0].item() == 1.0
    assert not gate.requires_grad
