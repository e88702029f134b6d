"""The contract of its kind, and the advantages by hand and against every set of k."""

from __future__ import annotations

from itertools import combinations
from math import sqrt
from statistics import fmean, pstdev

import pytest
import torch
from grpox.errors import ConfigError
from grpox.testing import AdvantageConformance

from grpox_passk.advantage import PasskAdvantage, passk_advantages
from grpox_passk.config import PasskAdvantageConfig

NAN = float("nan")


def of_sets(passed: list[bool], k: int) -> list[float]:
    """The definition: (reward of a set - mean) / std, averaged over the sets that a completion is in."""
    sets = list(combinations(range(len(passed)), k))
    rewards = [float(any(passed[place] for place in members)) for members in sets]
    if len(set(rewards)) < 2:
        return [0.0] * len(passed)
    mean, std = fmean(rewards), pstdev(rewards)
    pairs = [((reward - mean) / std, members) for reward, members in zip(rewards, sets, strict=True)]
    return [fmean(score for score, members in pairs if place in members) for place in range(len(passed))]


def passk(rewards, weights, groups):
    """The advantages by sets of a quarter of each group; a completion is right from 0.5 on."""
    advantages = [0.0] * len(rewards)
    for group in set(groups):
        rows = [row for row, other in enumerate(groups) if other == group and set(rewards[row]) != {None}]
        totals = [sum(w * (r or 0) for w, r in zip(weights, rewards[row], strict=True)) for row in rows]
        of_rows = of_sets([total >= 0.5 for total in totals], max(1, groups.count(group) // 4))
        for row, advantage in zip(rows, of_rows, strict=True):
            advantages[row] = advantage
    return advantages


class TestPasskAdvantage(AdvantageConformance):
    component = "passk"
    reference = staticmethod(passk)


@pytest.mark.parametrize("size", range(2, 10))
def test_it_is_the_mean_over_every_set_that_a_completion_is_in(size: int) -> None:
    for k in range(1, size + 1):
        for right in range(size + 1):
            first, *_, last = of_sets([place < right for place in range(size)], k)
            assert passk_advantages(right, size - right, k) == pytest.approx((first, last), abs=1e-12)


@pytest.mark.parametrize(
    ("right", "wrong", "k", "expected"),
    [
        # 3 of 6 pairs fail: mean and std are 1/2. A wrong one is in 3 pairs, 2 of which fail.
        (1, 3, 2, (0.5 / 0.5, (0.5 - 2 / 3) / 0.5)),
        # 1 of 10 sets fails: std is sqrt(0.09). A wrong one is in 6 sets, 1 of which fails.
        (2, 3, 3, (0.1 / 0.3, (0.1 - 1 / 6) / 0.3)),
        # GRPO's (r - mean) / std of the population, for rewards 1 1 0 0 0 0 0 0
        (2, 6, 1, (0.75 / sqrt(0.25 * 0.75), -0.25 / sqrt(0.25 * 0.75))),
    ],
)
def test_by_hand(right: int, wrong: int, k: int, expected: tuple[float, float]) -> None:
    assert passk_advantages(right, wrong, k) == pytest.approx(expected)


def scaled(
    rewards: list[list[float]], group_ids: list[int], weights: tuple[float, ...] = (1.0,), **params: float
) -> list[float]:
    scaler = PasskAdvantage(PasskAdvantageConfig(**params))
    return scaler.scale(torch.tensor(rewards), torch.tensor(weights), torch.tensor(group_ids)).tolist()


def test_a_completion_is_right_from_the_threshold_on() -> None:
    # 0.5 * 0.5 + 2 * 0.25 = 0.75, and the others less
    rewards = [[0.5, 0.25], [0.4, 0.25], [1.0, 0.0], [-1.0, 0.5]]
    assert scaled(rewards, [0] * 4, (0.5, 2.0), k=2, threshold=0.75) == pytest.approx([1.0] + [-1 / 3] * 3)


def test_a_completion_that_nobody_scored_is_not_right_below_a_threshold_of_zero() -> None:
    advantages = scaled([[-0.5], [NAN], [-2.0], [-2.0], [-2.0]], [0] * 5, k=2, threshold=-1)
    assert advantages == pytest.approx([1.0, 0.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("k", [4, 5])
def test_a_k_that_no_two_sets_of_a_group_have_is_refused_with_both_numbers(k: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"advantage\.k: a group of 4 completions has no two sets of k = {k}"
    ):
        scaled([[1.0], [0.0], [0.0], [0.0]], [0] * 4, k=k)
