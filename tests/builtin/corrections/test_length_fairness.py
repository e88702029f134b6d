"""Effect of a completion's length: the numbers of docs/corrections.md, from the corrections themselves."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

from grpox.contracts import Correction
from grpox_corrections.configs import GeometricMaskConfig, SequenceMaskConfig, SequenceTruncateConfig
from grpox_corrections.corrections import GeometricMask, SequenceMask, SequenceTruncate

GAP = 0.012
"""Nats a token."""


def of_constant_gap(correction: Correction, tokens: int) -> tuple[float, bool]:
    """Weight and keep of a completion in which every token has the same gap."""
    shape = (1, tokens)
    weights, keep = correction.correct(torch.full(shape, GAP), torch.zeros(shape), torch.ones(shape).bool())
    return weights[0, 0].item(), bool(keep[0, 0])


def kept_share(correction: Correction, tokens: int, rows: int) -> float:
    """Share of completions that are kept under independent normal noise of mean size GAP."""
    noise = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(0)) * deviation()
    mask = torch.ones_like(noise, dtype=torch.bool)
    _, keep = correction.correct(noise, torch.zeros_like(noise), mask)
    return keep[:, 0].double().mean().item()


def deviation() -> float:
    """The mean of |x| is sqrt(2 / pi) times the standard deviation."""
    return GAP * math.sqrt(math.pi / 2)


def tolerance(share: float, rows: int) -> float:
    """Four standard errors of a share."""
    return 4 * math.sqrt(share * (1 - share) / rows) + 1e-9


def test_a_constant_gap_passes_a_bound_of_3_at_92_tokens() -> None:
    # ln 3 / 0.012 = 91.55
    mask = SequenceMask(SequenceMaskConfig())
    assert of_constant_gap(mask, 91) == (pytest.approx(2.980, abs=5e-4), True)
    assert of_constant_gap(mask, 92) == (0.0, False)


def test_a_constant_gap_reaches_the_cap_of_2_at_58_tokens() -> None:
    # ln 2 / 0.012 = 57.76
    truncate = SequenceTruncate(SequenceTruncateConfig())
    assert of_constant_gap(truncate, 57)[0] == pytest.approx(1.982, abs=5e-4)
    assert of_constant_gap(truncate, 58)[0] == 2.0


@pytest.mark.parametrize("tokens", [1, 92, 5000])
def test_a_constant_gap_of_more_than_a_thousandth_fails_the_geometric_mean_at_every_length(tokens: int) -> None:
    assert of_constant_gap(GeometricMask(GeometricMaskConfig()), tokens) == (0.0, False)


@pytest.mark.parametrize(
    ("tokens", "rows", "told"), [(4, 20_000, 0.106), (100, 10_000, 0.494), (5000, 200, 1.0)]
)
def test_the_geometric_mean_keeps_few_short_completions(tokens: int, rows: int, told: float) -> None:
    mean = NormalDist(0.0, deviation() / math.sqrt(tokens))
    assert mean.cdf(math.log(1.001)) - mean.cdf(math.log(0.999)) == pytest.approx(told, abs=5e-4)
    found = kept_share(GeometricMask(GeometricMaskConfig()), tokens, rows)
    assert found == pytest.approx(told, abs=tolerance(told, rows))


@pytest.mark.parametrize(("tokens", "rows", "told"), [(100, 2000, 1.0), (5000, 1000, 0.849)])
def test_independent_gaps_hardly_add_up(tokens: int, rows: int, told: float) -> None:
    total = NormalDist(0.0, deviation() * math.sqrt(tokens))
    assert total.stdev == pytest.approx({100: 0.15, 5000: 1.06}[tokens], abs=5e-3)
    assert total.cdf(math.log(3)) == pytest.approx(told, abs=5e-4)
    found = kept_share(SequenceMask(SequenceMaskConfig()), tokens, rows)
    assert found == pytest.approx(told, abs=tolerance(told, rows))
