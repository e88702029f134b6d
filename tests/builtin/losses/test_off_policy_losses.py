"""gspo-token, dppo and topr: surrogates whose gradients are worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpox.contracts import LossInputs
from grpox_losses.configs import ClippedConfig, DppoConfig, GspoTokenConfig, ToprConfig
from grpox_losses.losses import Grpo
from grpox_losses.surrogates import Dppo, GspoToken, Topr, bernoulli_kl

MakeInputs = Callable[..., LossInputs]


def gradient(loss: Any, inputs: LossInputs) -> torch.Tensor:
    """The gradient that autograd gives, which must be the declared one."""
    actual = torch.autograd.grad(loss.per_token(inputs).loss.sum(), inputs.logprobs)[0]
    if hasattr(loss, "expected_gradient"):
        expected = loss.expected_gradient(inputs)
        assert not expected.requires_grad
        torch.testing.assert_close(actual, torch.where(inputs.token_mask, expected, 0.0))
    return actual


def check(actual: torch.Tensor, expected: Sequence[Sequence[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype))


def marked(loss: Any, inputs: LossInputs) -> dict[str, list[list[float]]]:
    return {name: values.tolist() for name, values in loss.per_token(inputs).diagnostics.items()}


# -- gspo-token --------------------------------------------------------------------------------------------


def test_gspo_token_by_hand(make_inputs: MakeInputs) -> None:
    # Log-ratios 0.3 and -0.1: w_i = exp(0.1) = 1.1052 at both tokens, inside of [0.8, 1.2].
    loss = GspoToken(GspoTokenConfig(clip_low=0.2, clip_high=0.2))
    inputs = make_inputs([[0.3, -0.1]], [[2.0, -0.5]])
    w = math.exp(0.1)

    check(loss.per_token(inputs).loss, [[-2 * w, 0.5 * w]])
    check(gradient(loss, inputs), [[-2 * w, 0.5 * w]])


def test_gspo_token_clips_each_token_by_the_sequence_and_its_own_advantage(make_inputs: MakeInputs) -> None:
    # w_i = exp(0.5) = 1.65, above 1.2: the token of positive advantage is clipped to 1.2, the other is not.
    # Second row w_i = exp(-0.5) = 0.607, below 0.8: the other way round.
    loss = GspoToken(GspoTokenConfig(clip_low=0.2, clip_high=0.2))
    inputs = make_inputs([[1.0, 0.0], [0.0, -1.0]], [[1.0, -1.0], [1.0, -1.0]])
    up, down = math.exp(0.5), math.exp(-0.5)

    check(loss.per_token(inputs).loss, [[-1.2, up], [-down, 0.8]])
    check(gradient(loss, inputs), [[0.0, up], [-down, 0.0]])
    assert marked(loss, inputs) == {  # the part of each sequence
        "clip_ratio/low": [0, 0.5],
        "clip_ratio/high": [0.5, 0],
        "clip_ratio/region": [0.5, 0.5],
    }


def test_gspo_token_has_the_gradient_of_gspo_where_a_sequence_has_one_advantage(
    make_inputs: MakeInputs,
) -> None:
    rows, mask = [[0.3, -0.1, 9.0], [0.1, 0.0, -0.4]], [[1, 1, 0], [1, 1, 1]]
    inputs = make_inputs(rows, [[1.5] * 3, [-0.5] * 3], mask)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    gspo = Grpo(ClippedConfig(level="sequence", **bounds))

    ours, theirs = GspoToken(GspoTokenConfig(**bounds)), gspo
    torch.testing.assert_close(gradient(ours, inputs), gradient(theirs, inputs))
    torch.testing.assert_close(ours.per_token(inputs).loss, theirs.per_token(inputs).loss)


# -- dppo --------------------------------------------------------------------------------------------------


def of_probabilities(pi: Sequence[float], mu: Sequence[float], advantages: Sequence[float]) -> LossInputs:
    logprobs, old = (torch.tensor([p], dtype=torch.float64).log() for p in (pi, mu))
    mask = torch.ones(1, len(pi), dtype=torch.bool)
    given = torch.tensor([advantages], dtype=torch.float64)
    return LossInputs(logprobs.requires_grad_(), old, given, mask)


def test_dppo_drops_what_moved_too_far_outwards() -> None:
    # pi - mu is 0.3, 0.3, -0.3, -0.3, 0.04: beyond 0.2 outwards are the first (A > 0) and the third (A < 0).
    # The last has the ratio 5, which clipping would stop, and stays.
    pi, mu = [0.5, 0.5, 0.1, 0.1, 0.05], [0.2, 0.2, 0.4, 0.4, 0.01]
    inputs = of_probabilities(pi, mu, [1.0, -2.0, -1.0, 2.0, 1.0])
    loss = Dppo(DppoConfig())

    slopes = [0.0, 5.0, 0.0, -0.5, -5.0]
    check(gradient(loss, inputs), [slopes])
    check(loss.per_token(inputs).loss, [[slope * math.log(p) for slope, p in zip(slopes, pi, strict=True)]])
    assert marked(loss, inputs) == {
        "clip_ratio/low": [[0, 0, 1, 0, 0]],
        "clip_ratio/high": [[1, 0, 0, 0, 0]],
        "clip_ratio/region": [[1, 0, 1, 0, 0]],
        "clip_ratio/cap": [[0, 0, 0, 0, 0]],
    }


def test_dppo_caps_the_weight() -> None:
    # Ratio 40 with a move of 0.039.
    inputs = of_probabilities([0.04, 0.04], [0.001, 0.001], [1.0, -1.0])
    loss = Dppo(DppoConfig())

    check(gradient(loss, inputs), [[-20.0, 20.0]])
    assert marked(loss, inputs)["clip_ratio/cap"] == [[1, 1]]


def test_dppo_by_kl() -> None:
    # From 0.2 to 0.4: 0.2 ln 0.5 + 0.8 ln(0.8/0.6) = -0.13863 + 0.23015 = 0.09152, above the default of 0.05.
    # From 0.2 to 0.3: 0.2 ln(2/3) + 0.8 ln(0.8/0.7) = -0.08109 + 0.10683 = 0.02573.
    inputs = of_probabilities([0.4, 0.4, 0.3], [0.2, 0.2, 0.2], [1.0, -1.0, 1.0])

    assert bernoulli_kl(inputs.old_logprobs.exp(), inputs.logprobs.detach().exp())[0].tolist() == pytest.approx(
        [0.09152, 0.09152, 0.02573], abs=1e-5
    )
    check(gradient(Dppo(DppoConfig(divergence="kl")), inputs), [[0.0, 2.0, -1.5]])
    check(gradient(Dppo(DppoConfig(divergence="kl", delta=0.1)), inputs), [[-2.0, 2.0, -1.5]])


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_is_finite_at_certainty(divergence: str) -> None:
    inputs = of_probabilities([1.0, 1e-300, 1.0], [1e-300, 1.0, 1.0], [1.0, -1.0, 1.0])

    assert gradient(Dppo(DppoConfig(divergence=divergence)), inputs).tolist() == [[0.0, 0.0, -1.0]]


@pytest.mark.parametrize("parameters", [{"delta": 1.0}, {"delta": 0.0}, {"cap": 0.5}, {"divergence": "js"}])
def test_dppo_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DppoConfig(**parameters)


# -- topr --------------------------------------------------------------------------------------------------


def test_topr_by_hand(make_inputs: MakeInputs) -> None:
    # Products of ratios: exp(-0.5), exp(-0.5) and exp(0.5). A bad completion weighs exp(-0.5), or at most 1.
    rows = [[0.25, -0.75], [0.25, -0.75], [0.75, -0.25]]
    inputs = make_inputs(rows, [[2.0, 2.0], [-2.0, -2.0], [-2.0, -2.0]])
    tapered = math.exp(-0.5)

    check(gradient(Topr(ToprConfig()), inputs), [[-2.0, -2.0], [2 * tapered, 2 * tapered], [2.0, 2.0]])
    values = Topr(ToprConfig()).per_token(inputs)
    check(
        values.loss,
        [[-2 * -1.25, -2 * -2.25], [2 * tapered * -1.25, 2 * tapered * -2.25], [2 * -0.75, 2 * -1.75]],
    )
    check(values.diagnostics["topr/weight"], [[1.0, 1.0], [tapered, tapered], [1.0, 1.0]])


def test_topr_multiplies_only_tokens_of_the_model(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[-0.5, -7.0, -0.5]], [[-1.0] * 3], [[1, 0, 1]])

    weights = Topr(ToprConfig()).per_token(inputs).diagnostics["topr/weight"]

    assert weights[0, 0].item() == pytest.approx(math.exp(-1.0))
