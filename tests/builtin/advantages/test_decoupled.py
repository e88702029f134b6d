"""GDPO (aggregation normalize_then_sum): numbers worked by hand, abstentions, where there is no signal."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError

from grpox_advantages.configs import GroupConfig, ScaledConfig
from grpox_advantages.scalers import Group

NAN = math.nan
Matrix = Sequence[Sequence[float]]
EXACT = GroupConfig(eps=0.0, ddof=0, aggregation="normalize_then_sum")
DEFAULT = GroupConfig(aggregation="normalize_then_sum")

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def scale(
    config: GroupConfig,
    rewards: Matrix,
    group_ids: Sequence[int],
    weights: Sequence[float] = (1.0, 1.0),
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    matrix, factors = torch.tensor(rewards, dtype=dtype), torch.tensor(weights, dtype=dtype)
    advantages = Group(config).scale(matrix, factors, torch.tensor(group_ids))
    assert advantages.dtype == torch.float32
    return advantages.tolist()


def reference(rewards: Matrix, ids: Sequence[int], weights: Sequence[float]) -> list[float]:
    """In plain floats with ddof 1 and eps 1e-4, the mean of the sums subtracted as the formula has it."""
    sums: list[float | None] = []
    for row, group in zip(rewards, ids, strict=True):
        terms = []
        for k, (reward, weight) in enumerate(zip(row, weights, strict=True)):
            column = [r[k] for r, g in zip(rewards, ids, strict=True) if g == group and not math.isnan(r[k])]
            if math.isnan(reward):
                continue
            flat = len(column) < 2 or len(set(column)) == 1
            spread = 1.0 if flat else statistics.stdev(column) + 1e-4
            terms.append(0.0 if flat else weight * (reward - statistics.fmean(column)) / spread)
        sums.append(sum(terms) if terms else None)
    scored = [s for s in sums if s is not None]
    mean, spread = statistics.fmean(scored), statistics.stdev(scored) + 1e-4
    return [0.0 if s is None else (s - mean) / spread for s in sums]


@both_dtypes
def test_hand_worked(dtype: torch.dtype) -> None:
    # First group: 0, 2 -> -1, 1 and 5, 5 -> 0, 0. Second: 0, 1 -> -1, 1 and 1, 3 -> -1, 1.
    # Sums with weights 1 and 0.5: -1, 1, -1.5, 1.5, of mean 0 and variance (1 + 1 + 2.25 + 2.25) / 4 = 1.625.
    rewards = [[0.0, 5.0], [2.0, 5.0], [0.0, 1.0], [1.0, 3.0]]
    whitened = [s / math.sqrt(1.625) for s in (-1, 1, -1.5, 1.5)]

    assert scale(EXACT, rewards, [0, 0, 1, 1], (1.0, 0.5), dtype) == pytest.approx(whitened)


@both_dtypes
def test_sums_that_group_scaling_cannot_tell_apart(dtype: torch.dtype) -> None:
    """The paper's case: a row right in one respect and one right in both are told apart between groups."""
    # Sums 0, 1 and 0, 2 are -1, 1 each after scaling; decoupled they are -1, 1 and -2, 2 over sqrt(2.5).
    rewards, ids = [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [0, 0, 1, 1]

    assert scale(GroupConfig(eps=0.0, ddof=0), rewards, ids, dtype=dtype) == pytest.approx([-1, 1, -1, 1])
    expected = [s / math.sqrt(2.5) for s in (-1, 1, -2, 2)]
    assert scale(EXACT, rewards, ids, dtype=dtype) == pytest.approx(expected)


def test_eps_is_added_in_both_places() -> None:
    # -1, 1 over 1 + 1 are -0.5, 0.5, whose standard deviation is 0.5: over 0.5 + 1 they are -1/3, 1/3.
    config = GroupConfig(eps=1.0, ddof=0, aggregation="normalize_then_sum")
    assert scale(config, [[0.0], [2.0]], [0, 0], (1.0,)) == pytest.approx([-1 / 3, 1 / 3])


def test_ddof_counts_in_both_places() -> None:
    # -1, 0, 1 have sample deviation 1; the six sums -1, 0, 1, -1, 0, 1 have sqrt(4 / 5).
    config = GroupConfig(eps=0.0, aggregation="normalize_then_sum")
    found = scale(config, [[1.0], [2.0], [3.0], [10.0], [20.0], [30.0]], [0, 0, 0, 1, 1, 1], (1.0,))
    assert found == pytest.approx([s / math.sqrt(0.8) for s in (-1, 0, 1, -1, 0, 1)])


@both_dtypes
def test_abstentions(dtype: torch.dtype) -> None:
    # First function: 1, 3 of mean 2 and deviation 1 -> -1, 1. Second: a single score -> 0. Last row: no score.
    # Sums -1, 0, 1 over three rows, not four: deviation sqrt(2 / 3).
    rewards = [[1.0, NAN], [NAN, 4.0], [3.0, NAN], [NAN, NAN]]

    found = scale(EXACT, rewards, [0, 0, 0, 0], dtype=dtype)

    assert found == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5), 0.0])
    assert (found[1], found[3]) == (0.0, 0.0)


@both_dtypes
def test_ragged_scattered_groups_with_abstentions(dtype: torch.dtype) -> None:
    draw = random.Random(11)
    # Sixteenths are exact in float32, so that both sides see the same rewards.
    rewards = [[draw.choice([NAN, draw.randint(-32, 32) / 16, 1.0]) for _ in range(3)] for _ in range(60)]
    ids = [draw.choice([3, 70, -2, 11, 12, 500, 501, 502]) for _ in range(60)]
    weights = (1.0, 0.5, -2.0)

    found = scale(DEFAULT, rewards, ids, weights, dtype)

    assert found == pytest.approx(reference(rewards, ids, weights), rel=1e-6, abs=1e-6)
    assert sum(a != 0 for a in found) > 30


@pytest.mark.parametrize("config", [EXACT, DEFAULT])
@both_dtypes
def test_groups_without_signal_are_exactly_zero_after_whitening(
    config: GroupConfig, dtype: torch.dtype
) -> None:
    # The mean over the batch is 0 by construction, so that whitening moves no group; three 0.1 average to
    # something else than 0.1.
    rewards, ids = [[0.1, 0.3]] * 3 + [[0.0, 1.0], [2.0, 1.5]], [0, 0, 0, 1, 1]

    found = scale(config, rewards, ids, dtype=dtype)

    assert found[:3] == [0.0] * 3
    assert found[3] == -found[4] < 0


@both_dtypes
def test_functions_that_cancel_leave_no_noise_to_blow_up(dtype: torch.dtype) -> None:
    # With weights 0.1, 0.2 and -0.3 the terms add up to 0 but for rounding.
    rewards = [[0.3] * 3, [0.1] * 3, [0.7] * 3]
    assert scale(EXACT, rewards, [0, 0, 0], (0.1, 0.2, -0.3), dtype) == [0.0] * 3


def test_one_function_in_groups_with_signal_is_group_scaling() -> None:
    # Each group has variance 1, and so has the batch.
    rewards, ids = [[0.0], [2.0], [1.0], [5.0]], [0, 0, 1, 1]
    plain = scale(GroupConfig(eps=0.0, ddof=0), rewards, ids, (1.0,))

    assert scale(EXACT, rewards, ids, (1.0,)) == pytest.approx(plain)


def test_only_group_has_an_aggregation() -> None:
    assert GroupConfig().model_dump() == {"eps": 1e-4, "ddof": 1, "aggregation": "sum_then_normalize"}
    with pytest.raises(ValidationError, match="aggregation"):
        ScaledConfig.model_validate({"aggregation": "normalize_then_sum"})
    with pytest.raises(ValidationError, match="normalize_then_sum"):
        GroupConfig.model_validate({"aggregation": "gdpo"})
