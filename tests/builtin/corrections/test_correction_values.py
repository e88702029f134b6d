"""The weights of each correction, worked by hand from the ratios pi_old / mu of single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

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

NAN = math.nan
Rows = Sequence[Sequence[float]]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def corrected(
    correction: Correction, ratios: Rows, dtype: torch.dtype, mask: Rows | None = None
) -> tuple[list[list[float]], list[list[bool]]]:
    """Weights and keep where pi_old / mu is `ratios`; NaN stands for a mu that was not reported."""
    sampler = -torch.tensor(ratios, dtype=dtype).log()
    token_mask = torch.ones_like(sampler) if mask is None else torch.tensor(mask)
    weights, keep = correction.correct(torch.zeros_like(sampler), sampler, token_mask.bool())
    return weights.tolist(), keep.tolist()


def near(rows: Rows) -> list[object]:
    return [pytest.approx(row, rel=1e-6) for row in rows]


def test_none(dtype: torch.dtype) -> None:
    weights, keep = corrected(NoCorrection(NoCorrectionConfig()), [[9.0, 0.1, NAN]], dtype)

    assert weights == [[1.0, 1.0, 1.0]]
    assert keep == [[True, True, True]]


def test_token_truncate(dtype: torch.dtype) -> None:
    # Only 2.5 is above the cap of 2; nothing bounds below; without mu the ratio is 1, as where it is masked.
    ratios, mask = [[0.5, 1.5, 2.5, NAN, 9.0]], [[1, 1, 1, 1, 0]]
    correction = TokenTruncate(TokenTruncateConfig())

    weights, keep = corrected(correction, ratios, dtype, mask)

    assert weights == near([[0.5, 1.5, 2.0, 1.0, 1.0]])
    assert keep == [[True] * 5]


def test_token_mask(dtype: torch.dtype) -> None:
    # 0.4 and 6 are outside [0.5, 5]; what is inside keeps its own ratio.
    weights, keep = corrected(TokenMask(TokenMaskConfig()), [[0.4, 0.6, 4.0, 6.0, NAN]], dtype)

    assert weights == near([[0.0, 0.6, 4.0, 0.0, 1.0]])
    assert keep == [[False, True, True, False, True]]


def test_the_bounds_belong_to_the_range() -> None:
    # 1 = exp(0) exactly.
    for config in (TokenMaskConfig(low=1.0, high=2.0), TokenMaskConfig(low=0.5, high=1.0)):
        assert corrected(TokenMask(config), [[1.0]], torch.float64) == ([[1.0]], [[True]])


# Products over the unmasked tokens: 0.5 * 1.5 * 2 = 1.5; 2 * 2 * 1.25 = 5; 0.5 * 0.5 * (unknown: 1) = 0.25.
SEQUENCES = [[0.5, 1.5, 2.0, 100.0], [2.0, 2.0, 1.25, 0.01], [0.5, 0.5, NAN, 7.0]]
SEQUENCE_MASK = [[1, 1, 1, 0]] * 3


def test_sequence_truncate(dtype: torch.dtype) -> None:
    correction = SequenceTruncate(SequenceTruncateConfig())

    weights, keep = corrected(correction, SEQUENCES, dtype, SEQUENCE_MASK)

    assert weights == near([[1.5] * 4, [2.0] * 4, [0.25] * 4])
    assert keep == [[True] * 4] * 3


def test_sequence_mask(dtype: torch.dtype) -> None:
    weights, keep = corrected(SequenceMask(SequenceMaskConfig()), SEQUENCES, dtype, SEQUENCE_MASK)

    assert weights == near([[1.5] * 4, [0.0] * 4, [0.25] * 4])
    assert keep == [[True] * 4, [False] * 4, [True] * 4]


def test_sequence_mask_with_a_lower_bound(dtype: torch.dtype) -> None:
    correction = SequenceMask(SequenceMaskConfig(low=0.5, high=6.0))

    weights, keep = corrected(correction, SEQUENCES, dtype, SEQUENCE_MASK)

    assert weights == near([[1.5] * 4, [5.0] * 4, [0.0] * 4])
    assert [row[0] for row in keep] == [True, True, False]


def test_geometric_mask(dtype: torch.dtype) -> None:
    # Geometric means: sqrt(2 * 0.5) = 1; sqrt(1.002 * 1.002) = 1.002; sqrt(0.9985) = 0.99925; 0.998.
    ratios = [[2.0, 0.5], [1.002, 1.002], [0.9985, 1.0], [0.998, 0.998]]

    weights, keep = corrected(GeometricMask(GeometricMaskConfig()), ratios, dtype)

    assert weights == near([[2.0, 0.5], [0.0, 0.0], [0.9985, 1.0], [0.0, 0.0]])
    assert [row[0] for row in keep] == [True, False, True, False]


def test_the_geometric_mean_is_over_the_unmasked_tokens_with_and_without_mu(dtype: torch.dtype) -> None:
    # 1.0015 over one token; the square root of it, 1.00075, over two.
    ratios, mask = [[1.0015, 1.0, 1.0], [1.0015, NAN, 1.0]], [[1, 0, 0], [1, 1, 0]]

    weights, keep = corrected(GeometricMask(GeometricMaskConfig()), ratios, dtype, mask)

    assert keep == [[False] * 3, [True] * 3]
    assert weights[1] == pytest.approx([1.0015, 1.0, 1.0])
