"""The weights of each correction, worked by hand from ratios pi_old / mu; odd inputs; parameters.

The conformance suite checks what holds for every correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import grpox
from grpox.errors import ConfigError

NAN, INF = math.nan, math.inf
Rows = Sequence[Sequence[float]]
NAMES = ("none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-mask")
# Products over the unmasked tokens: 0.5 * 1.5 * 2 = 1.5; 2 * 2 * 1.25 = 5; 0.5 * 0.5 * (unknown: 1) = 0.25.
SEQUENCES = [[0.5, 1.5, 2.0, 100.0], [2.0, 2.0, 1.25, 0.01], [0.5, 0.5, NAN, 7.0]]
SEQUENCE_MASK = [[1, 1, 1, 0]] * 3
BY_HAND: list[tuple[str, dict[str, float], Rows, Rows | None, Rows, Rows]] = [
    ("none", {}, [[9.0, 0.1, NAN]], None, [[1.0] * 3], [[1] * 3]),
    # Only 2.5 is above the cap of 2; nothing bounds below; without mu the ratio is 1, as where it is masked.
    (
        "token-truncate",
        {},
        [[0.5, 1.5, 2.5, NAN, 9.0]],
        [[1, 1, 1, 1, 0]],
        [[0.5, 1.5, 2.0, 1.0, 1.0]],
        [[1] * 5],
    ),
    # 0.4 and 6 are outside [0.5, 5]; what is inside keeps its own ratio.
    ("token-mask", {}, [[0.4, 0.6, 4.0, 6.0, NAN]], None, [[0.0, 0.6, 4.0, 0.0, 1.0]], [[0, 1, 1, 0, 1]]),
    # The bounds belong to the range: 1 = exp(0) exactly.
    ("token-mask", {"low": 1.0, "high": 2.0}, [[1.0]], None, [[1.0]], [[1]]),
    ("token-mask", {"low": 0.5, "high": 1.0}, [[1.0]], None, [[1.0]], [[1]]),
    (
        "sequence-truncate",
        {},
        SEQUENCES,
        SEQUENCE_MASK,
        [[1.5] * 4, [2.0] * 4, [0.25] * 4],
        [[1] * 4] * 3,
    ),
    (
        "sequence-mask",
        {},
        SEQUENCES,
        SEQUENCE_MASK,
        [[1.5] * 4, [0.0] * 4, [0.25] * 4],
        [[1] * 4, [0] * 4, [1] * 4],
    ),
    (
        "sequence-mask",
        {"low": 0.5, "high": 6.0},
        SEQUENCES,
        SEQUENCE_MASK,
        [[1.5] * 4, [5.0] * 4, [0.0] * 4],
        [[1] * 4, [1] * 4, [0] * 4],
    ),
    # Geometric means: sqrt(2 * 0.5) = 1; sqrt(1.002 * 1.002) = 1.002; sqrt(0.9985) = 0.99925; 0.998.
    (
        "geometric-mask",
        {},
        [[2.0, 0.5], [1.002, 1.002], [0.9985, 1.0], [0.998, 0.998]],
        None,
        [[2.0, 0.5], [0.0, 0.0], [0.9985, 1.0], [0.0, 0.0]],
        [[1, 1], [0, 0], [1, 1], [0, 0]],
    ),
    # Over the unmasked tokens, with and without mu: 1.0015 over one; its square root, 1.00075, over two.
    (
        "geometric-mask",
        {},
        [[1.0015, 1.0, 1.0], [1.0015, NAN, 1.0]],
        [[1, 0, 0], [1, 1, 0]],
        [[0.0] * 3, [1.0015, 1.0, 1.0]],
        [[0] * 3, [1] * 3],
    ),
]
"""Correction, parameters, ratios (NaN: mu was not reported), mask -> weights, keep."""

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@both_dtypes
@pytest.mark.parametrize(("name", "parameters", "ratios", "mask", "weights", "keep"), BY_HAND)
def test_by_hand(
    name: str,
    parameters: dict[str, float],
    ratios: Rows,
    mask: Rows | None,
    weights: Rows,
    keep: Rows,
    dtype: torch.dtype,
) -> None:
    sampler = -torch.tensor(ratios, dtype=dtype).log().requires_grad_()
    token_mask = torch.ones_like(sampler) if mask is None else torch.tensor(mask)
    correction = grpox.build("correction", name, parameters)

    made = correction.correct(torch.zeros_like(sampler).requires_grad_(), sampler, token_mask.bool())

    assert made[0].tolist() == [pytest.approx(row, rel=1e-6) for row in weights]
    assert made[1].tolist() == [list(map(bool, row)) for row in keep]
    assert (made[0].dtype, made[0].requires_grad, made[1].dtype) == (dtype, False, torch.bool)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_a_token_weigh_one_whatever_they_hold(name: str) -> None:
    old, sampler = torch.tensor([[NAN, INF], [-1.0, -1.0]]), torch.tensor([[-1.0, -INF], [NAN, -9.0]])
    for positions in (2, 0):
        mask = torch.zeros(2, positions, dtype=torch.bool)
        made = grpox.build("correction", name).correct(old[:, :positions], sampler[:, :positions], mask)
        assert [each.tolist() for each in made] == [[[1.0] * positions] * 2, [[True] * positions] * 2]


@both_dtypes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extreme", [30.0, 100.0, 800.0, 1e30, INF])
def test_extreme_differences_give_finite_weights(name: str, dtype: torch.dtype, extreme: float) -> None:
    """exp(100) overflows float32, exp(800) float64; the third row's sum is 0 or inf - inf."""
    old = torch.zeros(3, 4, dtype=dtype)
    up, down = [0.0, -extreme, 0.0, 0.0], [0.0, extreme, 0.0, 0.0]
    sampler = torch.tensor([up, down, [0.0, -extreme, extreme, 0.0]], dtype=dtype)

    weights, keep = grpox.build("correction", name).correct(old, sampler, torch.ones(3, 4, dtype=torch.bool))

    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert weights[~keep].eq(0).all()
    if name.endswith("truncate"):
        assert keep.all()
        assert weights[0, 1] == 2.0
    elif name != "none":
        assert not keep[0, 1]
    if name == "geometric-mask":  # opposite extremes pass, with weights that can be multiplied
        assert keep[2].all()
        assert weights[2].tolist() == pytest.approx([1.0, math.exp(20), math.exp(-extreme), 1.0], rel=1e-6)


CAP = ({"cap": 0.9}, {"cap": NAN}, {"cap": INF}, {"C": 2.0}, {"low": 0.5})
BAND = ({"low": -0.1}, {"low": 1.1}, {"high": 0.9}, {"high": INF}, {"high": 1.0, "low": 1.0}, {"cap": 2.0})


@pytest.mark.parametrize(
    ("name", "defaults", "refused"),
    [
        ("token-truncate", {"cap": 2.0}, CAP),
        ("token-mask", {"low": 0.5, "high": 5.0}, BAND),
        ("sequence-truncate", {"cap": 2.0}, CAP),
        ("sequence-mask", {"low": 0.0, "high": 3.0}, BAND),
        ("geometric-mask", {"low": 0.999, "high": 1.001}, BAND),
    ],
)
def test_parameters(name: str, defaults: dict[str, float], refused: Sequence[dict[str, Any]]) -> None:
    assert grpox.build("correction", name).config.model_dump() == defaults
    for parameters in refused:
        with pytest.raises(ConfigError) as caught:
            grpox.build("correction", name, parameters)
        assert {problem.key.split(".")[-1] for problem in caught.value.problems} == {next(iter(parameters))}
        if "high" in parameters and "low" in parameters:
            assert "must be more than low = 1" in str(caught.value)
