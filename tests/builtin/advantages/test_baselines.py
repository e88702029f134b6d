"""Advantages with other baselines than the group's mean: rloo, reinforce_plus_plus, maxrl, opo and quantile."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpox.contracts import AdvantageInputs, Turn
from grpox_advantages.baselines import MaxRl, Opo, Quantile, ReinforcePlusPlus, Rloo, rank_of
from grpox_advantages.configs import GroupConfig, QuantileConfig, ScaledConfig
from grpox_advantages.scalers import Batch, Centred, Group

NAN = math.nan


def scale(
    scaler: Any,
    rewards: Sequence[float],
    ids: Sequence[int],
    lengths: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Advantages of one reward function of weight 1; every completion has `lengths` tokens, else 1."""
    matrix, weights = torch.tensor(rewards, dtype=dtype).reshape(-1, 1), torch.ones(1, dtype=dtype)
    groups = torch.tensor(ids)
    if not isinstance(scaler, Opo):
        return checked(scaler.scale(matrix, weights, groups))
    counts = list(lengths) or [1] * len(ids)
    inputs = AdvantageInputs(
        rewards=matrix,
        weights=weights,
        group_ids=groups,
        prompt_ids=groups,
        lengths=torch.tensor(counts),
        model_masks=[torch.ones(n, dtype=torch.bool) for n in counts],
        columns={},
        step=1,
        turns=[(Turn(0, n, "stop", 0),) for n in counts],
    )
    return checked(scaler.scale(inputs))


def checked(advantages: torch.Tensor) -> list[float]:
    assert advantages.dtype == torch.float32
    return advantages.tolist()


RLOO, MAXRL, OPO = Rloo(), MaxRl(), Opo()
EVERY: dict[str, Any] = {
    "group": Group(GroupConfig(eps=0.0, ddof=0)),
    "batch": Batch(ScaledConfig(eps=0.0, ddof=0)),
    "none": Centred(),
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus(ScaledConfig(eps=0.0)),
    "maxrl": MAXRL,
    "opo": OPO,
    "quantile": Quantile(QuantileConfig(eps=0.0)),
}
each = pytest.mark.parametrize("name", EVERY)


# -- Of all ------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -0.3, 1e6 + 0.1, 1e-7])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_is_exactly_zero(
    name: str, value: float, size: int, dtype: torch.dtype
) -> None:
    if name == "maxrl" and value < 0:
        return  # refused by name
    # The mean of three 0.1 is not 0.1, and a difference of rounding noise over itself would be 1.
    lengths = [*range(1, size + 1), 1, 1]

    advantages = scale(EVERY[name], [value] * size + [0.0, 1.0], [0] * size + [1, 1], lengths, dtype)

    assert advantages[:size] == [0.0] * size
    assert advantages[-2] <= 0 <= advantages[-1]
    if name in ("group", "batch", "none"):
        assert advantages[-2] == -advantages[-1]
    assert any(advantages[size:])


@each
def test_a_group_with_fewer_than_two_scores_is_zero(name: str) -> None:
    assert scale(EVERY[name], [3.0, NAN, 5.0, NAN], [0, 0, 1, 2]) == [0.0] * 4


@each
def test_a_row_on_which_every_function_abstained_is_out_of_the_statistics(name: str) -> None:
    with_row = scale(EVERY[name], [1.0, NAN, 3.0, 8.0], [0, 0, 0, 0], [2, 90, 3, 4])
    without = scale(EVERY[name], [1.0, 3.0, 8.0], [0, 0, 0], [2, 3, 4])

    assert with_row[1] == 0.0
    assert [with_row[i] for i in (0, 2, 3)] == pytest.approx(without, rel=1e-6, abs=1e-7)


@each
def test_an_empty_batch(name: str) -> None:
    if name != "opo":
        assert scale(EVERY[name], [], []) == []


def test_the_group_that_the_docs_work_by_hand() -> None:
    rewards, ids, lengths = [0.0, 0.0, 0.0, 1.0], [0] * 4, [10, 10, 10, 30]
    exact = Quantile(QuantileConfig(eps=0.0, ddof=0))
    table = {RLOO: (-1 / 3, 1), MAXRL: (-1, 3), OPO: (-0.5, 0.5), exact: (0, 4 / math.sqrt(3))}

    for scaler, (wrong, right) in table.items():
        assert scale(scaler, rewards, ids, lengths) == pytest.approx([wrong] * 3 + [right])


# -- rloo --------------------------------------------------------------------------------------------------


def test_rloo_by_hand() -> None:
    # Of 1, 2, 6 the means of the others are 4, 3.5 and 1.5; of 0, 1 they are 1 and 0.
    assert scale(RLOO, [1.0, 0.0, 2.0, 1.0, 6.0], [0, 1, 0, 1, 0]) == pytest.approx([-3, -1, -1.5, 1, 4.5])


def test_rloo_leaves_one_out_of_ragged_groups() -> None:
    draw = random.Random(3)
    rewards = [draw.choice([NAN, draw.randint(-32, 32) / 16]) for _ in range(40)]
    ids = [draw.choice([3, 70, -2, 11]) for _ in range(40)]

    expected = []
    for i, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
        others = [r for j, r in enumerate(rewards) if j != i and ids[j] == group and not math.isnan(r)]
        expected.append(0.0 if math.isnan(reward) or not others else reward - statistics.fmean(others))

    assert scale(RLOO, rewards, ids) == pytest.approx(expected, rel=1e-6, abs=1e-6)


# -- reinforce_plus_plus -----------------------------------------------------------------------------------


def test_reinforce_plus_plus_by_hand() -> None:
    # Groups (0, 2) and (101, 105): deviations -1, 1, -2, 2, whose squares add up to 10. With ddof 0 the
    # standard deviation is sqrt(10 / 4); that of the rewards, which `batch` takes, is above 50.
    config = ScaledConfig(eps=0.0, ddof=0)
    expected = [d / math.sqrt(2.5) for d in (-1, 1, -2, 2)]

    advantages = scale(ReinforcePlusPlus(config), [0.0, 2.0, 101.0, 105.0], [0, 0, 1, 1])

    assert advantages == pytest.approx(expected)


def test_reinforce_plus_plus_adds_eps_to_the_standard_deviation_with_ddof_one() -> None:
    # Deviations -1, 1: sqrt(2 / 1) + 0.5.
    expected = [d / (math.sqrt(2) + 0.5) for d in (-1, 1)]
    assert scale(ReinforcePlusPlus(ScaledConfig(eps=0.5)), [0.0, 2.0], [0, 0]) == pytest.approx(expected)


# -- maxrl -------------------------------------------------------------------------------------------------


def test_maxrl_by_hand() -> None:
    # One right of four: mean 0.25, so (1 - 0.25) / 0.25 = 3 and -1. Three of four: 1/3 and -1.
    assert scale(MAXRL, [0.0, 1.0, 0.0, 0.0], [5] * 4) == pytest.approx([-1, 3, -1, -1])
    assert scale(MAXRL, [1.0, 1.0, 0.0, 1.0], [5] * 4) == pytest.approx([1 / 3, 1 / 3, -1, 1 / 3])


def test_maxrl_refuses_negative_rewards_by_name() -> None:
    with pytest.raises(ValueError, match=r"maxrl .* below 0: -0\.5"):
        scale(MAXRL, [1.0, -0.5], [0, 0])


# -- opo ---------------------------------------------------------------------------------------------------


def test_opo_by_hand() -> None:
    # Baseline (1 * 10 + 0 * 30) / 40 = 0.25; the plain mean would be 0.5.
    assert scale(OPO, [1.0, 0.0], [0, 0], [10, 30]) == pytest.approx([0.75, -0.25])
    # Second group: (2 * 1 + 4 * 3) / 4 = 3.5.
    advantages = scale(OPO, [1.0, 2.0, 0.0, 4.0], [0, 1, 0, 1], [10, 1, 30, 3])
    assert advantages == pytest.approx([0.75, -1.5, -0.25, 0.5])


def test_opo_is_the_plain_mean_for_equal_lengths() -> None:
    assert scale(OPO, [1.0, 2.0, 6.0], [0] * 3, [7] * 3) == pytest.approx([-2, -1, 3])


# -- quantile ----------------------------------------------------------------------------------------------


def binary(right: int, count: int) -> list[float]:
    return [1.0] * right + [0.0] * (count - right)


@pytest.mark.parametrize("right", range(1, 10))
@pytest.mark.parametrize(("q", "most_of_hard"), [(0.2, 8), (0.4, 6), (0.7, 3)])
def test_quantile_reinforces_successes_of_hard_groups_and_punishes_failures_of_easy_ones(
    right: int, q: float, most_of_hard: int
) -> None:
    # q 0.4 of 10: with 6 right or fewer at least 4 are 0, and the baseline is 0; else it is 1. A larger q makes
    # more groups easy.
    std = statistics.pstdev(binary(right, 10))
    baseline = 0.0 if right <= most_of_hard else 1.0

    advantages = scale(Quantile(QuantileConfig(q=q, eps=0.0, ddof=0)), binary(right, 10), [0] * 10)

    assert advantages == pytest.approx([(r - baseline) / std for r in binary(right, 10)])
    assert advantages.count(0.0) == (10 - right if right <= most_of_hard else right)


@pytest.mark.parametrize(
    ("q", "baseline"), [(0.1, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.75, 4.0), (0.9, 9.0)]
)
def test_quantile_of_four_rewards(q: float, baseline: float) -> None:
    # The quantile is one of the rewards 1, 2, 4, 9, never between two. Sum of squares around 4: 38.
    advantages = scale(Quantile(QuantileConfig(q=q, eps=0.0, ddof=0)), [9.0, 1.0, 4.0, 2.0], [0] * 4)

    expected = [(r - baseline) / math.sqrt(38 / 4) for r in (9, 1, 4, 2)]
    assert advantages == pytest.approx(expected)


def test_rank_of_is_exact_where_floating_point_is_not() -> None:
    assert 0.07 * 100 > 7  # which alone would give the eighth
    assert rank_of(0.07, 100) == 6


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1])
def test_quantile_refuses_a_share_outside_of_0_to_1(q: float) -> None:
    with pytest.raises(ValidationError):
        QuantileConfig(q=q)


def test_a_larger_quantile_punishes_the_failures_of_more_groups() -> None:
    """With half of ten right, failures are punished from q above 1/2 on, and successes reinforced below."""
    for q, right, wrong in ((0.4, 2.0, 0.0), (0.5, 2.0, 0.0), (0.6, 0.0, -2.0)):  # the deviation is 1/2
        advantages = scale(Quantile(QuantileConfig(q=q, eps=0.0, ddof=0)), binary(5, 10), [0] * 10)
        assert set(advantages) == {right, wrong}
