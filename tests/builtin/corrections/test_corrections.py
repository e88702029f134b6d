"""Contract of every correction: shapes, no gradient, finite weights; masked, missing tokens; parameters."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import BaseModel, ValidationError

from grpox.contracts import Correction
from grpox_corrections.configs import (
    GeometricMaskConfig,
    NoCorrectionConfig,
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
TRUE = torch.ones(1, 4, dtype=torch.bool)

CORRECTIONS: dict[str, Correction] = {
    "none": NoCorrection(NoCorrectionConfig()),
    "token-truncate": TokenTruncate(TokenTruncateConfig()),
    "token-mask": TokenMask(TokenMaskConfig()),
    "sequence-truncate": SequenceTruncate(SequenceTruncateConfig()),
    "sequence-mask": SequenceMask(SequenceMaskConfig()),
    "geometric-mask": GeometricMask(GeometricMaskConfig()),
}
each_correction = pytest.mark.parametrize("name", CORRECTIONS)
each_but_none = pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@each_correction
@both_dtypes
def test_shapes_dtypes_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    old = torch.full((1, 4), -1.0, dtype=dtype, requires_grad=True)
    sampler = torch.full((1, 4), -1.2, dtype=dtype, requires_grad=True)

    weights, keep = CORRECTIONS[name].correct(old, sampler, TRUE)

    assert (weights.shape, weights.dtype, weights.requires_grad) == ((1, 4), dtype, False)
    assert (keep.shape, keep.dtype) == ((1, 4), torch.bool)


@each_correction
@both_dtypes
def test_equal_distributions_weigh_exactly_one(name: str, dtype: torch.dtype) -> None:
    old = torch.tensor([[-0.1, -3.3, -7.7, -0.01]], dtype=dtype)

    weights, keep = CORRECTIONS[name].correct(old, old.clone(), TRUE)

    assert torch.equal(weights, torch.ones_like(old))
    assert keep.all()


@each_correction
def test_without_any_log_probability_every_token_weighs_one(name: str) -> None:
    weights, keep = CORRECTIONS[name].correct(torch.full((1, 4), -3.0), torch.full((1, 4), NAN), TRUE)

    assert weights.tolist() == [[1.0] * 4]
    assert keep.all()


@each_correction
def test_rows_without_a_token_weigh_one_whatever_they_hold(name: str) -> None:
    old, sampler = torch.tensor([[NAN, INF], [-1.0, -1.0]]), torch.tensor([[-1.0, -INF], [NAN, -9.0]])

    weights, keep = CORRECTIONS[name].correct(old, sampler, torch.zeros(2, 2, dtype=torch.bool))

    assert weights.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert keep.all()


@each_correction
def test_a_batch_without_positions(name: str) -> None:
    empty = torch.zeros(2, 0)

    weights, keep = CORRECTIONS[name].correct(empty, empty, torch.zeros(2, 0, dtype=torch.bool))

    assert (weights.shape, keep.shape) == ((2, 0), (2, 0))


@each_but_none
def test_what_is_masked_counts_for_nothing(name: str) -> None:
    old = torch.tensor([[-1.0, -1.1, -1.0, NAN], [-2.0, -0.4, 5.0, -INF]])
    sampler = torch.tensor([[-1.001, -1.1, -50.0, -1.0], [-2.0, -1.4, -INF, NAN]])
    mask = torch.tensor([[True, True, False, False]] * 2)

    weights, keep = CORRECTIONS[name].correct(old, sampler, mask)
    alone, alone_keep = CORRECTIONS[name].correct(old[:, :2], sampler[:, :2], mask[:, :2])

    assert torch.equal(weights[:, :2], alone)
    assert torch.equal(keep[:, :2], alone_keep)


@each_correction
def test_rows_may_come_in_any_order(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(16, 5, generator=generator)
    sampler = old + 0.3 * torch.randn(16, 5, generator=generator)
    mask = torch.rand(16, 5, generator=generator) > 0.3
    order = torch.randperm(16, generator=generator)

    weights, keep = CORRECTIONS[name].correct(old, sampler, mask)
    shuffled, shuffled_keep = CORRECTIONS[name].correct(old[order], sampler[order], mask[order])

    assert torch.equal(shuffled, weights[order])
    assert torch.equal(shuffled_keep, keep[order])


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
    old, sampler = torch.zeros(1, 2), torch.tensor([[-1000.0, 1000.0]])

    weights, keep = CORRECTIONS["geometric-mask"].correct(old, sampler, TRUE[:, :2])

    assert keep.all()
    assert weights.tolist() == [[pytest.approx(math.exp(20)), 0.0]]


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (NoCorrectionConfig, {}),
        (TokenTruncateConfig, {"cap": 2.0}),
        (TokenMaskConfig, {"low": 0.5, "high": 5.0}),
        (SequenceTruncateConfig, {"cap": 2.0}),
        (SequenceMaskConfig, {"low": 0.0, "high": 3.0}),
        (GeometricMaskConfig, {"low": 0.999, "high": 1.001}),
    ],
)
def test_defaults(config: type[BaseModel], defaults: dict[str, float]) -> None:
    assert config().model_dump() == defaults


@pytest.mark.parametrize("config", [TokenTruncateConfig, SequenceTruncateConfig])
@pytest.mark.parametrize("parameters", [{"cap": 0.9}, {"cap": NAN}, {"cap": INF}, {"C": 2.0}, {"low": 0.5}])
def test_refused_caps(config: type[BaseModel], parameters: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        config.model_validate(parameters)


@pytest.mark.parametrize("config", [TokenMaskConfig, SequenceMaskConfig, GeometricMaskConfig])
@pytest.mark.parametrize(
    "parameters",
    [{"low": -0.1}, {"low": 1.1}, {"high": 0.9}, {"high": INF}, {"low": 5.0, "high": 3.0}, {"cap": 2.0}],
)
def test_refused_bounds(config: type[BaseModel], parameters: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        config.model_validate(parameters)


def test_an_empty_range_is_told_at_high() -> None:
    with pytest.raises(ValidationError) as caught:
        TokenMaskConfig(low=1.0, high=1.0)
    (error,) = caught.value.errors()
    assert error["loc"] == ("high",)
    assert "must be more than low = 1" in error["msg"]
