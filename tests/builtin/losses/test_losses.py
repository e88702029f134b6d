"""The built-in losses: numbers worked by hand, diagnostics, declarations and parameters.

The conformance suite checks what holds for every loss. `unit/testing` has whole steps of grpo, dr_grpo, dapo,
bnpo, cispo and sapo with all their options, by hand and against a reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError

from grpox.contracts import LossInputs, Reduction
from grpox.testing import step_gradient
from grpox_losses.configs import (
    CispoConfig,
    ClippedConfig,
    DppoConfig,
    GspoTokenConfig,
    LuspoConfig,
    SapoConfig,
    ToprConfig,
)
from grpox_losses.losses import Bnpo, Cispo, Clipped, Dapo, DrGrpo, Grpo, Luspo, Sapo, sequence_ratio
from grpox_losses.surrogates import Dppo, GspoToken, Topr, bernoulli_kl

Rows = Sequence[Sequence[float]]
LOSSES = {
    Reduction.SEQUENCE_MEAN: [Grpo(ClippedConfig()), Sapo(SapoConfig()), GspoToken(GspoTokenConfig())],
    Reduction.SEQUENCE_SUM_BY_MAX_LENGTH: [DrGrpo(ClippedConfig())],
    Reduction.TOKEN_MEAN: [Dapo(ClippedConfig()), Cispo(CispoConfig()), Dppo(DppoConfig())],
    Reduction.SEQUENCE_SUM: [Topr(ToprConfig()), Luspo(LuspoConfig())],
    Reduction.LOCAL_TOKEN_MEAN: [Bnpo(ClippedConfig())],
}


def inputs_of(log_ratios: Rows, advantages: Rows, mask: Rows | None = None) -> LossInputs:
    """Log-probabilities `-1.5 + log_ratio`; masked positions hold 0 everywhere, as the core gives."""
    token_mask = torch.tensor(mask or [[1] * len(row) for row in log_ratios]).bool()
    now, old, given = (
        torch.tensor(rows, dtype=torch.float64).masked_fill(~token_mask, 0)
        for rows in (
            [[-1.5 + each for each in row] for row in log_ratios],
            [[-1.5] * len(log_ratios[0])],
            advantages,
        )
    )
    return LossInputs(now.requires_grad_(), old, given, token_mask)


def of_probabilities(pi: Sequence[float], mu: Sequence[float], advantages: Sequence[float]) -> LossInputs:
    logprobs, old = (torch.tensor([p], dtype=torch.float64).log() for p in (pi, mu))
    given = torch.tensor([advantages], dtype=torch.float64)
    return LossInputs(logprobs.requires_grad_(), old, given, torch.ones(1, len(pi)).bool())


def gradient(loss: Any, inputs: LossInputs) -> torch.Tensor:
    """The gradient that autograd gives, which must be the declared one."""
    actual = torch.autograd.grad(loss.per_token(inputs).loss.sum(), inputs.logprobs)[0]
    if hasattr(loss, "expected_gradient"):
        expected = loss.expected_gradient(inputs)
        assert not expected.requires_grad
        torch.testing.assert_close(actual, torch.where(inputs.token_mask, expected, 0.0))
    return actual


def check(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual.detach(), torch.tensor(expected, dtype=torch.float64))


def diagnostics_of(loss: Any, inputs: LossInputs) -> dict[str, list[Any]]:
    found = loss.per_token(inputs).diagnostics
    assert not any(values.requires_grad for values in found.values())
    return {name: values.tolist() for name, values in found.items()}


def test_reductions_and_that_all_are_zero_at_zero_advantage() -> None:
    for reduction, losses in LOSSES.items():
        assert {loss.reduction for loss in losses} == {reduction}
        assert all(loss.zero_at_zero_advantage for loss in losses)


# -- Ratios of tokens --------------------------------------------------------------------------------------


def test_the_ratio_is_exact_up_to_a_log_ratio_of_20_and_stays_there() -> None:
    inputs, largest = inputs_of([[20.0, 1000.0, -20.0, -1000.0]], [[-1.0] * 4]), math.exp(20)
    check(Clipped(ClippedConfig(clip_low=1.0)).per_token(inputs).loss, [[largest, largest, *[1 / largest] * 2]])
    check(gradient(Clipped(ClippedConfig(clip_low=1.0)), inputs), [[largest, 0.0, 1 / largest, 0.0]])


def test_diagnostics_count_tokens_whose_gradient_the_clip_removed() -> None:
    # Above the range with A > 0 and below it with A < 0; the others keep their gradient, or have A = 0.
    inputs = inputs_of([[0.5, 0.5, -0.5, -0.5, 0.0, 0.5, -0.5]], [[1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 0.0]])
    assert diagnostics_of(Clipped(ClippedConfig()), inputs) == {
        "clip_ratio/low": [[0, 0, 0, 1, 0, 0, 0]],
        "clip_ratio/high": [[1, 0, 0, 0, 0, 0, 0]],
        "clip_ratio/region": [[1, 0, 0, 1, 0, 0, 0]],
    }
    slopes = [[0.0, math.exp(0.5), -math.exp(-0.5), 0.0, -1.0, 0.0, 0.0]]
    check(gradient(Clipped(ClippedConfig()), inputs), slopes)


def test_cispo_counts_capped_tokens_with_a_positive_advantage() -> None:
    inputs = inputs_of([[2.0, 2.0, 1.0, -2.0, 2.0]], [[1.0, -1.0, 1.0, 1.0, 0.0]])
    assert diagnostics_of(Cispo(CispoConfig()), inputs) == {"clip_ratio/cap": [[1.0, 0.0, 0.0, 0.0, 0.0]]}
    check(gradient(Cispo(CispoConfig()), inputs), [[-5.0, 5.0, -math.e, -math.exp(-2), 0.0]])


def test_the_gate_of_sapo_is_the_slope_in_w_over_the_unclipped_one() -> None:
    inputs = inputs_of([[0.0, 0.4, -0.8, 0.3]], [[1.0, -2.0, 0.5, 0.0]])
    [[*gate]] = diagnostics_of(Sapo(SapoConfig()), inputs)["sapo/gate"]
    ratios, advantages = map(math.exp, (0.0, 0.4, -0.8, 0.3)), (1.0, -2.0, 0.5, 0.0)
    slopes = [-a * w * g for a, w, g in zip(advantages, ratios, gate, strict=True)]
    check(gradient(Sapo(SapoConfig()), inputs), [slopes])
    assert gate[0] == 1.0
    assert 0 < gate[1] < 1


# -- The ratio of a sequence -------------------------------------------------------------------------------

LOG_RATIOS = [[0.10, -0.04, 0.03, 0.25], [-0.30, -0.20, 0.05, 0.0], [0.50, 0.30, 0.0, 0.0], [0.1] * 4]
ADVANTAGES = [[0.8] * 4, [-1.1] * 4, [0.6] * 4, [1.0] * 4]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens_and_1_without_any() -> None:
    # (0.10 - 0.04 + 0.03 + 0.25) / 4 = 0.085; (-0.30 - 0.20 + 0.05) / 3 = -0.15; 0.50 / 1
    inputs = inputs_of(LOG_RATIOS, ADVANTAGES, MASK)
    check(sequence_ratio(inputs), [[math.exp(x)] * 4 for x in (0.085, -0.15, 0.5, 0.0)])
    of_tokens = gradient(Grpo(ClippedConfig(level="sequence")), inputs)
    assert of_tokens[:2].ne(0).tolist() == torch.tensor(MASK[:2]).bool().tolist()
    assert not of_tokens[2:].any()  # e^0.5 with A > 0 is clipped


def test_luspo_by_hand() -> None:
    """The sum over a sequence is its length times GSPO's: 4 * 0.8 * e^0.085 and 3 * 1.1 * e^-0.15.

    The third, e^0.5 with A > 0, is clipped at 1.2. Each token of a sequence that is not clipped has the
    gradient -w_i A, whatever the length.
    """
    inputs = inputs_of(LOG_RATIOS, ADVANTAGES, MASK)
    loss = Luspo(LuspoConfig()).per_token(inputs).loss
    sums = torch.where(inputs.token_mask, loss, 0.0).sum(dim=1)
    first, second = 0.8 * math.exp(0.085), 1.1 * math.exp(-0.15)
    check(sums, [-4 * first, 3 * second, -0.6 * 1.2, 0.0])
    slopes = torch.autograd.grad(sums.sum(), inputs.logprobs)[0]
    check(slopes, [[-first] * 4, [second, second, second, 0.0], [0.0] * 4, [0.0] * 4])


def test_the_kl_of_luspo_is_that_of_whole_completions() -> None:
    """The sum over a completion, as of the loss itself; rho is 0.1, -0.2, 0.3 in one and 0.4 in the other.

    TRL 1.16.0 has the same loss and gradient (`luspo` at sequence level, the KL without bias correction).
    """
    rho = [[0.1, -0.2, 0.3], [0.4]]
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, 0.0, 0.0]], dtype=torch.float64)
    reference = logprobs + torch.tensor([rho[0], [*rho[1], 0.0, 0.0]], dtype=torch.float64)
    batch = {
        "logprobs": logprobs,
        "ref_logprobs": reference,
        "advantages": torch.tensor([1.0, -1.0]),
        "token_mask": torch.tensor([[True] * 3, [True, False, False]]),
    }
    loss, (slopes,) = step_gradient("luspo", [batch], beta=0.1, max_completion_length=3)
    kl = [sum(math.exp(each) - each - 1 for each in row) for row in rho]
    assert float(loss) == pytest.approx(((-3 + 0.1 * kl[0]) + (1 + 0.1 * kl[1])) / 2, rel=1e-12)
    assert float(loss) == pytest.approx(-0.9917207411814549, rel=1e-12)  # TRL's
    first = [(-1 + 0.1 * (1 - math.exp(each))) / 2 for each in rho[0]]
    check(slopes, [first, [(1 + 0.1 * (1 - math.exp(0.4))) / 2, 0.0, 0.0]])


GSPO_TOKEN = GspoToken(GspoTokenConfig(clip_low=0.2, clip_high=0.2))


def test_gspo_token_clips_each_token_by_the_sequence_and_its_own_advantage() -> None:
    # w_i = exp(0.5) = 1.65, above 1.2: the token of positive advantage is clipped to 1.2, the other is not.
    # Second row w_i = exp(-0.5) = 0.607, below 0.8: the other way round. Third w_i = exp(0.1) = 1.1052, inside.
    # Tokens without an advantage are never clipped.
    rows = [[1.0, 0.0], [0.0, -1.0], [0.3, -0.1], [1.0, 0.0], [-1.0, 0.0]]
    inputs = inputs_of(rows, [[1.0, -1.0], [1.0, -1.0], [2.0, -0.5], [0.0, 0.0], [0.0, 0.0]])
    up, down, inner = math.exp(0.5), math.exp(-0.5), math.exp(0.1)

    check(
        GSPO_TOKEN.per_token(inputs).loss, [[-1.2, up], [-down, 0.8], [-2 * inner, 0.5 * inner], *[[0, 0]] * 2]
    )
    slopes = [[0.0, up], [-down, 0.0], [-2 * inner, 0.5 * inner], [0.0] * 2, [0.0] * 2]
    check(gradient(GSPO_TOKEN, inputs), slopes)
    assert diagnostics_of(GSPO_TOKEN, inputs) == {  # the part of each sequence
        "clip_ratio/low": [0, 0.5, 0, 0, 0],
        "clip_ratio/high": [0.5, 0, 0, 0, 0],
        "clip_ratio/region": [0.5, 0.5, 0, 0, 0],
    }


def test_gspo_token_has_the_gradient_of_gspo_where_a_sequence_has_one_advantage() -> None:
    rows, mask = [[0.3, -0.1, 9.0], [0.1, 0.0, -0.4]], [[1, 1, 0], [1, 1, 1]]
    inputs = inputs_of(rows, [[1.5] * 3, [-0.5] * 3], mask)
    gspo = Grpo(ClippedConfig(level="sequence", clip_low=0.2, clip_high=0.2))
    torch.testing.assert_close(gradient(GSPO_TOKEN, inputs), gradient(gspo, inputs))
    torch.testing.assert_close(GSPO_TOKEN.per_token(inputs).loss, gspo.per_token(inputs).loss)


def test_topr_by_hand() -> None:
    # Products of ratios: exp(-0.5), exp(-0.5) and exp(0.5). A bad completion weighs exp(-0.5), or at most 1. In
    # the last only the first token is the model's.
    rows = [[0.25, -0.75], [0.25, -0.75], [0.75, -0.25], [-1.0, -7.0]]
    inputs = inputs_of(rows, [[2.0] * 2, *[[-2.0] * 2] * 3], [*[[1, 1]] * 3, [1, 0]])
    down, far = math.exp(-0.5), math.exp(-1.0)

    check(gradient(Topr(ToprConfig()), inputs), [[-2.0] * 2, [2 * down] * 2, [2.0] * 2, [2 * far, 0.0]])
    values = [[2.5, 4.5], [2 * down * -1.25, 2 * down * -2.25], [-1.5, -3.5], [2 * far * -2.5, 0.0]]
    check(Topr(ToprConfig()).per_token(inputs).loss, values)
    weights = [row[0] for row in diagnostics_of(Topr(ToprConfig()), inputs)["topr/weight"]]
    assert weights == pytest.approx([1.0, down, 1.0, far])


# -- dppo --------------------------------------------------------------------------------------------------


def test_dppo_drops_what_moved_too_far_outwards() -> None:
    # pi - mu is 0.3, 0.3, -0.3, -0.3, 0.04: beyond 0.2 outwards are the first (A > 0) and the third (A < 0).
    # The last has the ratio 5, which clipping would stop, and stays.
    pi, mu = [0.5, 0.5, 0.1, 0.1, 0.05], [0.2, 0.2, 0.4, 0.4, 0.01]
    inputs = of_probabilities(pi, mu, [1.0, -2.0, -1.0, 2.0, 1.0])
    loss = Dppo(DppoConfig())

    slopes = [0.0, 5.0, 0.0, -0.5, -5.0]
    check(gradient(loss, inputs), [slopes])
    check(loss.per_token(inputs).loss, [[slope * math.log(p) for slope, p in zip(slopes, pi, strict=True)]])
    assert diagnostics_of(loss, inputs) == {
        "clip_ratio/low": [[0, 0, 1, 0, 0]],
        "clip_ratio/high": [[1, 0, 0, 0, 0]],
        "clip_ratio/region": [[1, 0, 1, 0, 0]],
        "clip_ratio/cap": [[0, 0, 0, 0, 0]],
    }
    # Ratio 40 with a move of 0.039: the weight is bounded.
    inputs = of_probabilities([0.04, 0.04, 0.04], [0.001, 0.001, 0.001], [1.0, -1.0, 0.0])
    check(gradient(loss, inputs), [[-20.0, 20.0, 0.0]])
    assert diagnostics_of(loss, inputs)["clip_ratio/cap"] == [[1, 1, 0]]


def test_dppo_by_kl() -> None:
    # From 0.2 to 0.4: 0.2 ln 0.5 + 0.8 ln(0.8/0.6) = -0.13863 + 0.23015 = 0.09152, above the default of 0.05.
    # From 0.2 to 0.3: 0.2 ln(2/3) + 0.8 ln(0.8/0.7) = -0.08109 + 0.10683 = 0.02573.
    inputs = of_probabilities([0.4, 0.4, 0.3], [0.2, 0.2, 0.2], [1.0, -1.0, 1.0])
    found = bernoulli_kl(inputs.old_logprobs.exp(), inputs.logprobs.detach().exp())[0].tolist()
    assert found == pytest.approx([0.09152, 0.09152, 0.02573], abs=1e-5)
    check(gradient(Dppo(DppoConfig(divergence="kl")), inputs), [[0.0, 2.0, -1.5]])
    check(gradient(Dppo(DppoConfig(divergence="kl", delta=0.1)), inputs), [[-2.0, 2.0, -1.5]])


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_is_finite_at_certainty(divergence: str) -> None:
    inputs = of_probabilities([1.0, 1e-300, 1.0], [1e-300, 1.0, 1.0], [1.0, -1.0, 1.0])
    assert gradient(Dppo(DppoConfig(divergence=divergence)), inputs).tolist() == [[0.0, 0.0, -1.0]]


# -- Parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (ClippedConfig, {"clip_low": 0.2, "clip_high": None, "delta": None, "level": "token"}),
        (LuspoConfig, {"clip_low": 0.2, "clip_high": None, "delta": None}),
        (CispoConfig, {"cap": 5.0}),
        (SapoConfig, {"tau_pos": 1.0, "tau_neg": 1.05}),
        (GspoTokenConfig, {"clip_low": 3e-4, "clip_high": 4e-4}),
        (DppoConfig, {"divergence": "tv", "delta": None, "cap": 20.0}),
    ],
)
def test_defaults(config: type[BaseModel], defaults: dict[str, Any]) -> None:
    assert config().model_dump() == defaults


@pytest.mark.parametrize(
    ("config", "parameters", "key"),
    [
        (ClippedConfig, {"delta": 1.2}, "delta"),
        (ClippedConfig, {"delta": 1.25, "clip_high": 0.28}, "delta"),
        (ClippedConfig, {"delta": 0.9, "clip_low": 0.3}, "delta"),
        (ClippedConfig, {"delta": float("inf")}, "delta"),
        (ClippedConfig, {"clip_low": 0.0}, "clip_low"),
        (ClippedConfig, {"clip_low": 1.1}, "clip_low"),
        (ClippedConfig, {"clip_high": -0.1}, "clip_high"),
        (ClippedConfig, {"level": "word"}, "level"),
        (ClippedConfig, {"clip_hi": 0.28}, "clip_hi"),
        (LuspoConfig, {"delta": 1.1}, "delta"),
        (LuspoConfig, {"level": "token"}, "level"),
        (CispoConfig, {"cap": 0.5}, "cap"),
        (SapoConfig, {"tau_pos": 0.0}, "tau_pos"),
        (SapoConfig, {"tau_neg": -1.0}, "tau_neg"),
        (DppoConfig, {"delta": 1.0}, "delta"),
        (DppoConfig, {"delta": 0.0}, "delta"),
        (DppoConfig, {"cap": 0.5}, "cap"),
        (DppoConfig, {"divergence": "js"}, "divergence"),
    ],
)
def test_refused_parameters_are_named(config: type[BaseModel], parameters: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config.model_validate(parameters)
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]


def test_bounds_next_to_a_refused_value_are_accepted() -> None:
    assert ClippedConfig(clip_low=1.0, clip_high=0.28, delta=1.29).delta == 1.29
    assert DppoConfig(divergence="kl", delta=1.0, cap=1.0).bound == 1.0
    assert (CispoConfig(cap=1.0).cap, [DppoConfig(divergence=each).bound for each in ("tv", "kl")]) == (
        1.0,
        [0.2, 0.05],
    )
