"""The weights of each correction, worked by hand from ratios pi_old / mu; odd inputs; parameters.

The conformance suite checks what holds for every correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from pydantic import BaseModel, ValidationError

from grpox.contracts import Correction
from grpox_corrections.configs import (
    GeometricMaskConfig,
    SequenceMaskConfig,
    SequenceTruncateConfig,
    TokenMaskConfig,
    TokenTruncateConfig,
)
from grpox_corrections.corrections import (
    GeometricMask,
    NoCorrection,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
)

NAN, INF = math.nan, math.inf
Rows = Sequence[Sequence[float]]
CORRECTIONS: dict[str, Correction] = {
    "none": NoCorrection(),
    "token-truncate": TokenTruncate(TokenTruncateConfig()),
    "token-mask": TokenMask(TokenMaskConfig()),
    "sequence-truncate": SequenceTruncate(SequenceTruncateConfig()),
    "sequence-mask": SequenceMask(SequenceMaskConfig()),
    "geometric-mask": GeometricMask(GeometricMaskConfig()),
}
# Products over the unmasked tokens: 0.5 * 1.5 * 2 = 1.5; 2 * 2 * 1.25 = 5; 0.5 * 0.5 * (unknown: 1) = 0.25.
SEQUENCES = [[0.5, 1.5, 2.0, 100.0], [2.0, 2.0, 1.25, 0.01], [0.5, 0.5, NAN, 7.0]]
SEQUENCE_MASK = [[1, 1, 1, 0]] * 3
BY_HAND: list[tuple[Correction, Rows, Rows | None, Rows, Rows]] = [
    (CORRECTIONS["none"], [[9.0, 0.1, NAN]], None, [[1.0] * 3], [[1] * 3]),
    # Only 2.5 is above the cap of 2; nothing bounds below; without mu the ratio is 1, as where it is masked.
    (
        CORRECTIONS["token-truncate"],
        [[0.5, 1.5, 2.5, NAN, 9.0]],
        [[1, 1, 1, 1, 0]],
        [[0.5, 1.5, 2.0, 1.0, 1.0]],
        [[1] * 5],
    ),
    # 0.4 and 6 are outside [0.5, 5]; what is inside keeps its own ratio.
    (
        CORRECTIONS["token-mask"],
        [[0.4, 0.6, 4.0, 6.0, NAN]],
        None,
        [[0.0, 0.6, 4.0, 0.0, 1.0]],
        [[0, 1, 1, 0, 1]],
    ),
    # The bounds belong to the range: 1 = exp(0) exactly.
    (TokenMask(TokenMaskConfig(low=1.0, high=2.0)), [[1.0]], None, [[1.0]], [[1]]),
    (TokenMask(TokenMaskConfig(low=0.5, high=1.0)), [[1.0]], None, [[1.0]], [[1]]),
    (
        CORRECTIONS["sequence-truncate"],
        SEQUENCES,
        SEQUENCE_MASK,
        [[1.5] * 4, [2.0] * 4, [0.25] * 4],
        [[1] * 4] * 3,
    ),
    (
        CORRECTIONS["sequence-mask"],
        SEQUENCES,
        SEQUENCE_MASK,
        [[1.5] * 4, [0.0] * 4, [0.25] * 4],
        [[1] * 4, [0] * 4, [1] * 4],
    ),
    (
        SequenceMask(SequenceMaskConfig(low=0.5, high=6.0)),
        SEQUENCES,
        SEQUENCE_MASK,
        [[1.5] * 4, [5.0] * 4, [0.0] * 4],
        [[1] * 4, [1] * 4, [0] * 4],
    ),
    # Geometric means: sqrt(2 * 0.5) = 1; sqrt(1.002 * 1.002) = 1.002; sqrt(0.9985) = 0.99925; 0.998.
    (
        CORRECTIONS["geometric-mask"],
        [[2.0, 0.5], [1.002, 1.002], [0.9985, 1.0], [0.998, 0.998]],
        None,
        [[2.0, 0.5], [0.0, 0.0], [0.9985, 1.0], [0.0, 0.0]],
        [[1, 1], [0, 0], [1, 1], [0, 0]],
    ),
    # Over the unmasked tokens, with and without mu: 1.0015 over one; its square root, 1.00075, over two.
    (
        CORRECTIONS["geometric-mask"],
        [[1.0015, 1.0, 1.0], [1.0015, NAN, 1.0]],
        [[1, 0, 0], [1, 1, 0]],
        [[0.0] * 3, [1.0015, 1.0, 1.0]],
        [[0] * 3, [1] * 3],
    ),
]
"""Correction, ratios (NaN: mu was not reported), mask -> weights, keep."""

each_correction = pytest.mark.parametrize("name", CORRECTIONS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@both_dtypes
@pytest.mark.parametrize(("correction", "ratios", "mask", "weights", "keep"), BY_HAND)
def test_by_hand(
    correction: Correction, ratios: Rows, mask: Rows | None, weights: Rows, keep: Rows, dtype: torch.dtype
) -> None:
    sampler = -torch.tensor(ratios, dtype=dtype).log().requires_grad_()
    token_mask = torch.ones_like(sampler) if mask is None else torch.tensor(mask)

    made = correction.correct(torch.zeros_like(sampler).requires_grad_(), sampler, token_mask.bool())

    assert made[0].tolist() == [pytest.approx(row, rel=1e-6) for row in weights]
    assert made[1].tolist() == [list(map(bool, row)) for row in keep]
    assert (made[0].dtype, made[0].requires_grad, made[1].dtype) == (dtype, False, torch.bool)


@each_correction
def test_rows_without_a_token_weigh_one_whatever_they_hold(name: str) -> None:
    old, sampler = torch.tensor([[NAN, INF], [-1.0, -1.0]]), torch.tensor([[-1.0, -INF], [NAN, -9.0]])
    for positions in (2, 0):
        mask = torch.zeros(2, positions, dtype=torch.bool)
        weights, keep = CORRECTIONS[name].correct(old[:, :positions], sampler[:, :positions], mask)
        assert weights.tolist() == [[1.0] * positions] * 2
        assert keep.tolist() == [[True] * positions] * 2


@each_correction
def test_numbers_that_are_not_finite_count_for_nothing_where_masked(name: str) -> None:
    old = torch.tensor([[-1.0, -1.1, -1.0, NAN], [-2.0, -0.4, 5.0, -INF]])
    sampler = torch.tensor([[-1.001, -1.1, -50.0, -1.0], [-2.0, -1.4, -INF, NAN]])
    mask = torch.tensor([[True, True, False, False]] * 2)

    made = CORRECTIONS[name].correct(old, sampler, mask)
    alone = CORRECTIONS[name].correct(old[:, :2], sampler[:, :2], mask[:, :2])

    assert all(torch.equal(one[:, :2], other) for one, other in zip(made, alone, strict=True))


@each_correction
@both_dtypes
@pytest.mark.parametrize("extreme", [30.0, 100.0, 800.0, 1e30, INF])
def test_extreme_differences_give_finite_weights(name: str, dtype: torch.dtype, extreme: float) -> None:
    """exp(100) overflows float32, exp(800) float64; the third row's sum is 0 or inf - inf."""
    old = torch.zeros(3, 4, dtype=dtype)
    up, down = [0.0, -extreme, 0.0, 0.0], [0.0, extreme, 0.0, 0.0]
    sampler = torch.tensor([up, down, [0.0, -extreme, extreme, 0.0]], dtype=dtype)

    weights, keep = CORRECTIONS[name].correct(old, sampler, torch.ones(3, 4, dtype=torch.bool))

    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert weights[~keep].eq(0).all()
    if name.endswith("truncate"):
        assert keep.all()
        assert weights[0, 1] == 2.0
    elif name != "none":
        assert not keep[0, 1]


def test_opposite_extremes_pass_the_geometric_mean_with_weights_that_can_be_multiplied() -> None:
    sampler = torch.tensor([[-1000.0, 1000.0]])

    weights, keep = CORRECTIONS["geometric-mask"].correct(torch.zeros(1, 2), sampler, torch.ones(1, 2).bool())

    assert keep.all()
    assert weights.tolist() == [[pytest.approx(math.exp(20)), 0.0]]


CAP = ({"cap": 0.9}, {"cap": NAN}, {"cap": INF}, {"C": 2.0}, {"low": 0.5})
BAND = ({"low": -0.1}, {"low": 1.1}, {"high": 0.9}, {"high": INF}, {"low": 5.0, "high": 3.0}, {"cap": 2.0})


@pytest.mark.parametrize(
    ("config", "defaults", "refused"),
    [
        (TokenTruncateConfig, {"cap": 2.0}, CAP),
        (TokenMaskConfig, {"low": 0.5, "high": 5.0}, BAND),
        (SequenceTruncateConfig, {"cap": 2.0}, CAP),
        (SequenceMaskConfig, {"low": 0.0, "high": 3.0}, BAND),
        (GeometricMaskConfig, {"low": 0.999, "high": 1.001}, BAND),
    ],
)
def test_parameters(
    config: type[BaseModel], defaults: dict[str, float], refused: Sequence[dict[str, float]]
) -> None:
    assert config().model_dump() == defaults
    for parameters in refused:
        with pytest.raises(ValidationError):
            config.model_validate(parameters)


def test_an_empty_range_is_told_at_high() -> None:
    with pytest.raises(ValidationError) as caught:
        TokenMaskConfig(low=1.0, high=1.0)
    (error,) = caught.value.errors()
    assert error["loc"] == ("high",)
    assert "must be more than low = 1" in error["msg"]
