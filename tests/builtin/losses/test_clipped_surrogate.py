"""The clipped surrogate at token level, against numbers worked by hand and a reference in plain floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from grpox.contracts import LossInputs
from grpox_losses.configs import ClippedConfig
from grpox_losses.losses import Clipped

MakeInputs = Callable[..., LossInputs]


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), inputs.logprobs)[0]


def reference(
    log_ratio: float, advantage: float, low: float, high: float, delta: float = math.inf
) -> tuple[float, float]:
    """Value and slope in log pi, by the cases that the minimum takes."""
    w = math.exp(log_ratio)
    if advantage >= 0:
        # The minimum is the smaller of w and the clip: only the upper bound is ever active.
        return (-(1 + high) * advantage, 0.0) if w > 1 + high else (-w * advantage, -w * advantage)
    # The minimum is the larger of w and the clip: the lower bound, then w as far as delta.
    if w < 1 - low:
        return -(1 - low) * advantage, 0.0
    return (-delta * advantage, 0.0) if w > delta else (-w * advantage, -w * advantage)


LOG_RATIOS = [-20.0, -3.0, -0.4, -0.2, -0.05, 0.0, 0.05, 0.17, 0.23, 0.3, 0.9, 1.5, 3.0, 20.0]


@pytest.mark.parametrize(
    ("low", "high", "delta"), [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.2, 2.0), (1.0, 3.0, 5.0)]
)
@pytest.mark.parametrize("advantage", [1.5, -0.75, 0.0])
def test_value_and_slope_agree_with_the_cases(
    make_inputs: MakeInputs, low: float, high: float | None, delta: float | None, advantage: float
) -> None:
    inputs = make_inputs([LOG_RATIOS], [[advantage] * len(LOG_RATIOS)])
    config = ClippedConfig(clip_low=low, clip_high=high, delta=delta)

    loss = Clipped(config).per_token(inputs).loss

    # What the inputs hold after rounding, so that the comparison is not one of old + difference - old.
    log_ratios = (inputs.logprobs - inputs.old_logprobs).detach()[0].tolist()
    bound = math.inf if delta is None else delta
    expected = [reference(x, advantage, low, low if high is None else high, bound) for x in log_ratios]
    values, slopes = (torch.tensor([column], dtype=loss.dtype) for column in zip(*expected, strict=True))
    tolerance = 1e-6 if loss.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(loss, values, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient(loss, inputs), slopes, rtol=tolerance, atol=tolerance)


def test_hand_worked_numbers(make_inputs: MakeInputs) -> None:
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


def test_a_zero_advantage_gives_zero_value_and_zero_gradient(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([LOG_RATIOS], [[0.0] * len(LOG_RATIOS)])

    loss = Clipped(ClippedConfig(delta=3.0)).per_token(inputs).loss

    assert not loss.any()
    assert not gradient(loss, inputs).any()


def test_delta_bounds_the_unclipped_branch_only(make_inputs: MakeInputs) -> None:
    # w = 4 with delta 2: where A = -1 the unclipped branch is chosen and gives 2 in place of 4, without
    # gradient. Where A = +1, or w is below the range, the clipped branch is, and nothing changes.
    inputs = make_inputs([[math.log(4), math.log(4), math.log(0.5)]], [[-1.0, 1.0, -1.0]], old=0.0)
    unbounded = Clipped(ClippedConfig()).per_token(inputs).loss
    bounded = Clipped(ClippedConfig(delta=2.0)).per_token(inputs).loss

    torch.testing.assert_close(unbounded, torch.tensor([[4.0, -1.2, 0.8]], dtype=unbounded.dtype))
    torch.testing.assert_close(bounded, torch.tensor([[2.0, -1.2, 0.8]], dtype=bounded.dtype))
    assert not gradient(bounded, inputs).any()


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


def test_clip_high_moves_the_upper_bound_alone(make_inputs: MakeInputs) -> None:
    # w = 1.25 is clipped at 1.2, not at 1.28; w = 0.75 is clipped at 0.8 either way.
    inputs = make_inputs([[math.log(1.25), math.log(0.75)]], [[1.0, -1.0]], old=0.0)

    narrow = Clipped(ClippedConfig()).per_token(inputs).loss
    wide = Clipped(ClippedConfig(clip_high=0.28)).per_token(inputs).loss

    torch.testing.assert_close(narrow, torch.tensor([[-1.2, 0.8]], dtype=narrow.dtype))
    torch.testing.assert_close(wide, torch.tensor([[-1.25, 0.8]], dtype=wide.dtype))
