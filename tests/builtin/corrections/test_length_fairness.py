"""Effect of a completion's length: the numbers of docs/corrections.md, from the corrections themselves."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

import grpox

GAP = 0.012
"""Nats a token."""
DEVIATION = GAP * math.sqrt(math.pi / 2)
"""Standard deviation of normal noise whose mean size is GAP: the mean of |x| is sqrt(2 / pi) times it."""


def kept_share(correction: str, tokens: int, rows: int) -> tuple[float, float]:
    """Share of completions that are kept under independent normal noise, and four standard errors of it."""
    noise = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(0)) * DEVIATION
    mask = torch.ones_like(noise, dtype=torch.bool)
    _, keep = grpox.build("correction", correction).correct(noise, torch.zeros_like(noise), mask)
    share = keep[:, 0].double().mean().item()
    return share, 4 * math.sqrt(share * (1 - share) / rows) + 1e-9


@pytest.mark.parametrize(
    ("correction", "tokens", "weight", "keep"),
    [
        ("sequence-mask", 91, 2.980, True),  # ln 3 / 0.012 = 91.55
        ("sequence-mask", 92, 0.0, False),
        ("sequence-truncate", 57, 1.982, True),  # ln 2 / 0.012 = 57.76
        ("sequence-truncate", 58, 2.0, True),
        *(("geometric-mask", tokens, 0.0, False) for tokens in (1, 92, 5000)),
    ],
)
def test_a_constant_gap(correction: str, tokens: int, weight: float, keep: bool) -> None:
    """Every token of a completion has the same gap, of more than a thousandth."""
    shape = (1, tokens)
    made = grpox.build("correction", correction).correct(
        torch.full(shape, GAP), torch.zeros(shape), torch.ones(shape).bool()
    )
    assert made[0][0, 0].item() == pytest.approx(weight, abs=5e-4)
    assert bool(made[1][0, 0]) == keep


@pytest.mark.parametrize(
    ("tokens", "rows", "told"), [(4, 20_000, 0.106), (100, 10_000, 0.494), (5000, 200, 1.0)]
)
def test_the_geometric_mean_keeps_few_short_completions(tokens: int, rows: int, told: float) -> None:
    mean = NormalDist(0.0, DEVIATION / math.sqrt(tokens))
    assert mean.cdf(math.log(1.001)) - mean.cdf(math.log(0.999)) == pytest.approx(told, abs=5e-4)
    found, errors = kept_share("geometric-mask", tokens, rows)
    assert found == pytest.approx(told, abs=errors)


@pytest.mark.parametrize(("tokens", "rows", "told"), [(100, 2000, 1.0), (5000, 1000, 0.849)])
def test_independent_gaps_hardly_add_up(tokens: int, rows: int, told: float) -> None:
    total = NormalDist(0.0, DEVIATION * math.sqrt(tokens))
    assert total.stdev == pytest.approx({100: 0.15, 5000: 1.06}[tokens], abs=5e-3)
    assert total.cdf(math.log(3)) == pytest.approx(told, abs=5e-4)
    found, errors = kept_share("sequence-mask", tokens, rows)
    assert found == pytest.approx(told, abs=errors)
