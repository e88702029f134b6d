"""Weights for the generator's distribution: what token-truncate gives, and that none gives nothing."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from grpox_corrections.configs import NoCorrectionConfig, TokenTruncateConfig
from grpox_corrections.none import NoCorrection
from grpox_corrections.token_truncate import TokenTruncate

NAN = math.nan
TRUE = torch.ones(1, 4, dtype=torch.bool)

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@both_dtypes
def test_token_truncate_weighs_by_trainer_over_sampler_up_to_the_cap(dtype: torch.dtype) -> None:
    # pi_old / mu = 0.5, 1.5, 2.5, 1: only the third is above the cap of 2, and nothing bounds below.
    old = torch.tensor([[0.1, 0.3, 0.5, 0.4]], dtype=dtype).log()
    sampler = torch.tensor([[0.2, 0.2, 0.2, 0.4]], dtype=dtype).log()

    weights, keep = TokenTruncate(TokenTruncateConfig()).correct(old, sampler, TRUE)

    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.5, 2.0, 1.0]], dtype=dtype))
    assert keep.all()


@both_dtypes
def test_equal_distributions_weigh_exactly_one(dtype: torch.dtype) -> None:
    old = torch.tensor([[-0.1, -3.3, -7.7, -0.01]], dtype=dtype)

    weights, _ = TokenTruncate(TokenTruncateConfig()).correct(old, old.clone(), TRUE)

    assert torch.equal(weights, torch.ones_like(old))


def test_masked_and_missing_tokens_weigh_one() -> None:
    old = torch.tensor([[-1.0, -1.0, NAN, -1.0]])
    sampler = torch.tensor([[-2.0, NAN, -1.0, -9.0]])
    mask = torch.tensor([[True, True, False, False]])

    weights, keep = TokenTruncate(TokenTruncateConfig(cap=10.0)).correct(old, sampler, mask)

    torch.testing.assert_close(weights, torch.tensor([[math.e, 1.0, 1.0, 1.0]]))
    assert keep.all()


@both_dtypes
def test_extreme_differences_stay_finite(dtype: torch.dtype) -> None:
    difference = torch.tensor([[-1000.0, -20.0, 20.0, 1000.0]], dtype=dtype)

    weights, _ = TokenTruncate(TokenTruncateConfig()).correct(difference, torch.zeros_like(difference), TRUE)

    assert weights.tolist() == [[0.0, pytest.approx(math.exp(-20)), 2.0, 2.0]]


@pytest.mark.parametrize(
    "correction", [NoCorrection(NoCorrectionConfig()), TokenTruncate(TokenTruncateConfig())]
)
def test_no_gradient_flows_through_a_correction(correction: NoCorrection | TokenTruncate) -> None:
    old = torch.full((1, 4), -1.0, requires_grad=True)

    weights, keep = correction.correct(old, torch.full((1, 4), -1.2), TRUE)

    assert not weights.requires_grad
    assert (weights.shape, keep.shape, keep.dtype) == ((1, 4), (1, 4), torch.bool)


def test_none_ignores_what_the_sampler_said() -> None:
    old, sampler = torch.full((1, 4), -1.0), torch.tensor([[-9.0, NAN, 0.0, -1.0]])

    weights, keep = NoCorrection(NoCorrectionConfig()).correct(old, sampler, TRUE)

    assert weights.tolist() == [[1.0] * 4]
    assert keep.all()


@pytest.mark.parametrize("parameters", [{"cap": 0.9}, {"cap": NAN}, {"C": 2.0}])
def test_refused_parameters(parameters: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        TokenTruncateConfig.model_validate(parameters)
    assert TokenTruncateConfig().cap == 2.0
