"""The built-in losses of a token's ratio: numbers worked by hand, declarations and parameters.

The conformance suite checks what holds for every loss, `unit/testing` whole steps against a reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pydantic import BaseModel, ValidationError

from grpox.contracts import LossInputs, PolicyLoss, Reduction
from grpox_losses.configs import (
    CispoConfig,
    ClippedConfig,
    DppoConfig,
    GspoTokenConfig,
    LuspoConfig,
    SapoConfig,
    ToprConfig,
)
from grpox_losses.losses import Bnpo, Cispo, Clipped, Dapo, DrGrpo, Grpo, Luspo, Sapo
from grpox_losses.surrogates import Dppo, GspoToken, Topr

MakeInputs = Callable[..., LossInputs]
LOSSES = {
    Reduction.SEQUENCE_MEAN: [Grpo(ClippedConfig()), Sapo(SapoConfig()), GspoToken(GspoTokenConfig())],
    Reduction.SEQUENCE_SUM_BY_MAX_LENGTH: [DrGrpo(ClippedConfig())],
    Reduction.TOKEN_MEAN: [Dapo(ClippedConfig()), Cispo(CispoConfig()), Dppo(DppoConfig())],
    Reduction.SEQUENCE_SUM: [Topr(ToprConfig()), Luspo(LuspoConfig())],
    Reduction.LOCAL_TOKEN_MEAN: [Bnpo(ClippedConfig())],
}
ALL = [loss for losses in LOSSES.values() for loss in losses]
each_loss = pytest.mark.parametrize("loss", ALL, ids=lambda loss: type(loss).__name__)


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), inputs.logprobs)[0]


def test_reductions() -> None:
    for reduction, losses in LOSSES.items():
        assert {loss.reduction for loss in losses} == {reduction}


@each_loss
def test_zero_at_zero_advantage_is_true(loss: PolicyLoss, make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[-2.0, 0.0, 2.0]], [[0.0, 0.0, 0.0]])

    values = loss.per_token(inputs).loss

    assert loss.zero_at_zero_advantage
    assert not values.any()
    assert not gradient(values, inputs).any()


@each_loss
def test_shapes_and_dtypes(loss: PolicyLoss, make_inputs: MakeInputs, dtype: torch.dtype) -> None:
    output = loss.per_token(make_inputs([[0.1, -0.1, 0.3]] * 2, [[1.0] * 3, [-1.0] * 3]))

    tensors = [output.loss, *output.diagnostics.values()]
    assert output.loss.shape == (2, 3)
    assert {tensor.shape for tensor in tensors} <= {torch.Size([2, 3]), torch.Size([2])}
    assert {tensor.dtype for tensor in tensors} == {dtype}


@each_loss
def test_a_wholly_masked_batch_gives_zeros_that_are_still_on_the_graph(
    loss: PolicyLoss, make_inputs: MakeInputs
) -> None:
    inputs = make_inputs([[0.4, 0.2]], [[1.0, 1.0]], [[0, 0]])

    values = loss.per_token(inputs).loss

    assert not values.any()
    assert gradient(values, inputs).tolist() == [[0.0, 0.0]]


# -- The clipped surrogate ---------------------------------------------------------------------------------


def test_clipped_by_hand(make_inputs: MakeInputs) -> None:
    # w = 1.5, 0.5, 1.5, 0.5, 1.1, 0.9 with clip 0.2:
    #   A= 2: min(3, 2.4) = 2.4; min(1, 1.6) = 1        A=-2: min(-3, -2.4) = -3; min(-1, -1.6) = -1.6
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 1.1, 0.9], [2.0, 2.0, -2.0, -2.0, 2.0, -2.0]
    inputs = make_inputs([[math.log(w) for w in ratios]], [advantages], old=0.0)

    loss = Clipped(ClippedConfig()).per_token(inputs).loss

    expected = torch.tensor([[-2.4, -1.0, 3.0, 1.6, -2.2, 1.8]], dtype=loss.dtype)
    torch.testing.assert_close(loss, expected)
    slopes = torch.tensor([[0.0, -1.0, 3.0, 0.0, -2.2, 1.8]], dtype=loss.dtype)
    torch.testing.assert_close(gradient(loss, inputs), slopes)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_the_value_is_minus_the_advantage_to_the_bit(make_inputs: MakeInputs, level: str) -> None:
    advantages = [[0.3, 0.3, 0.3], [-1.7, -1.7, -1.7], [0.0, 0.0, 0.0]]
    inputs = make_inputs([[0.0] * 3] * 3, advantages)

    loss = Clipped(ClippedConfig(level=level)).per_token(inputs).loss

    assert torch.equal(loss, -inputs.advantages)
    torch.testing.assert_close(gradient(loss, inputs), -inputs.advantages)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("log_ratio", [-1000.0, -20.0, 20.0, 1000.0])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_extreme_ratios_stay_finite(
    make_inputs: MakeInputs, level: str, log_ratio: float, advantage: float
) -> None:
    inputs = make_inputs([[log_ratio] * 2], [[advantage] * 2])

    loss = Clipped(ClippedConfig(level=level)).per_token(inputs).loss

    assert loss.isfinite().all()
    assert gradient(loss, inputs).isfinite().all()


def test_the_ratio_is_exact_at_a_log_ratio_of_20(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[20.0]], [[-1.0]], old=0.0)

    loss = Clipped(ClippedConfig()).per_token(inputs).loss

    expected = torch.tensor([[math.exp(20)]], dtype=loss.dtype)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, inputs), expected)


def test_diagnostics_count_tokens_whose_gradient_the_clip_removed(make_inputs: MakeInputs) -> None:
    # Above the range with A > 0 and below it with A < 0; the other two keep their gradient.
    inputs = make_inputs([[0.5, 0.5, -0.5, -0.5, 0.0]], [[1.0, -1.0, 1.0, -1.0, 1.0]])

    output = Clipped(ClippedConfig()).per_token(inputs)

    assert {name: flags[0].tolist() for name, flags in output.diagnostics.items()} == {
        "clip_ratio/low": [0, 0, 0, 1, 0],
        "clip_ratio/high": [1, 0, 0, 0, 0],
        "clip_ratio/region": [1, 0, 0, 1, 0],
    }
    stopped = gradient(output.loss, inputs) == 0
    assert torch.equal(stopped, output.diagnostics["clip_ratio/region"].bool())
    assert not any(flags.requires_grad for flags in output.diagnostics.values())


# -- cispo, sapo -------------------------------------------------------------------------------------------


def test_cispo_by_hand(make_inputs: MakeInputs) -> None:
    # w = 10, 10, 2, 0.1 with cap 5: weights 5, 5, 2, 0.1 (no lower bound); log pi = log w.
    ratios, advantages = [10.0, 10.0, 2.0, 0.1], [1.0, -1.0, 0.5, -2.0]
    log_ratios = [math.log(w) for w in ratios]
    inputs = make_inputs([log_ratios], [advantages], old=0.0)

    loss = Cispo(CispoConfig()).per_token(inputs).loss

    slopes = [-5.0, 5.0, -1.0, 0.2]
    values = [slope * logprob for slope, logprob in zip(slopes, log_ratios, strict=True)]
    torch.testing.assert_close(loss, torch.tensor([values], dtype=loss.dtype))
    torch.testing.assert_close(gradient(loss, inputs), torch.tensor([slopes], dtype=loss.dtype))


def test_the_diagnostic_counts_capped_tokens_with_a_positive_advantage(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[2.0, 2.0, 1.0, -2.0]], [[1.0, -1.0, 1.0, 1.0]])

    output = Cispo(CispoConfig()).per_token(inputs)

    assert output.diagnostics["clip_ratio/cap"].tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_on_policy_the_sapo_value_is_minus_two_a_over_tau_and_the_slope_minus_a(
    make_inputs: MakeInputs,
) -> None:
    inputs = make_inputs([[0.0, 0.0, 0.0]], [[0.9, -0.9, 0.0]])

    loss = Sapo(SapoConfig()).per_token(inputs).loss

    expected = torch.tensor([[-2 * 0.9 / 1.0, 2 * 0.9 / 1.05, 0.0]], dtype=loss.dtype)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, inputs), -inputs.advantages)


def test_sapo_by_hand(make_inputs: MakeInputs) -> None:
    # A = 1, tau = 1, w = 2: -4 sigmoid(1) = -4 * 0.7310586; slope in log pi -4 * 0.1966119 * 2.
    inputs = make_inputs([[math.log(2)]], [[1.0]], old=0.0)

    loss = Sapo(SapoConfig()).per_token(inputs).loss

    assert loss.item() == pytest.approx(-2.9242343, rel=1e-6)
    assert gradient(loss, inputs).item() == pytest.approx(-1.5728955, rel=1e-6)


def test_the_gate_diagnostic_is_the_slope_in_w_over_the_unclipped_one(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[0.0, 0.4, -0.8]], [[1.0, -2.0, 0.5]])

    output = Sapo(SapoConfig()).per_token(inputs)

    gate = output.diagnostics["sapo/gate"]
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    torch.testing.assert_close(gradient(output.loss, inputs), -inputs.advantages * ratio * gate)
    assert gate[0, 0].item() == 1.0
    assert not gate.requires_grad


# -- Parameters --------------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert ClippedConfig().model_dump() == {
        "clip_low": 0.2,
        "clip_high": None,
        "delta": None,
        "level": "token",
    }
    assert CispoConfig().model_dump() == {"cap": 5.0}
    assert SapoConfig().model_dump() == {"tau_pos": 1.0, "tau_neg": 1.05}


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"delta": 1.2}, "delta"),
        ({"delta": 1.25, "clip_high": 0.28}, "delta"),
        ({"delta": 0.9, "clip_low": 0.3}, "delta"),
        ({"delta": float("inf")}, "delta"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"level": "word"}, "level"),
        ({"clip_hi": 0.28}, "clip_hi"),
    ],
)
def test_refused_clipped_parameters_are_named(parameters: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ClippedConfig.model_validate(parameters)
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]


def test_delta_just_above_the_clip_is_accepted() -> None:
    assert ClippedConfig(clip_high=0.28, delta=1.29).delta == 1.29


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(CispoConfig, {"cap": 0.5}), (SapoConfig, {"tau_pos": 0.0}), (SapoConfig, {"tau_neg": -1.0})],
)
def test_refused_parameters(config: type[BaseModel], parameters: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        config.model_validate(parameters)
