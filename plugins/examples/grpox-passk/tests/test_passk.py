"""The advantages, by hand and against every set of k; thresholds, abstentions and small groups."""

from __future__ import annotations

from itertools import combinations
from math import sqrt
from statistics import fmean, pstdev

import pytest
import torch
from grpox.errors import ConfigError

from grpox_passk.advantage import PasskAdvantage, passk_advantages
from grpox_passk.config import PasskAdvantageConfig

NAN = float("nan")


def by_enumeration(right: int, wrong: int, k: int) -> tuple[float, float]:
    """The definition: (reward of a set - mean) / std, averaged over the sets that a completion is in."""
    rewards = [1.0] * right + [0.0] * wrong
    sets = list(combinations(range(len(rewards)), k))
    passed = [max(rewards[place] for place in members) for members in sets]
    mean, std = fmean(passed), pstdev(passed)
    if std == 0:
        return 0.0, 0.0
    advantages = [(reward - mean) / std for reward in passed]

    def of(place: int) -> float:
        return fmean(value for value, members in zip(advantages, sets, strict=True) if place in members)

    return of(0), of(len(rewards) - 1)


@pytest.mark.parametrize("completions", range(2, 10))
def test_it_is_the_mean_over_every_set_that_a_completion_is_in(completions: int) -> None:
    compared = 0
    for k in range(1, completions + 1):
        for right in range(1, completions):
            expected = by_enumeration(right, completions - right, k)
            assert passk_advantages(right, completions - right, k) == pytest.approx(expected, abs=1e-12)
            compared += expected != (0.0, 0.0)
    # It says something: those with fewer than k wrong ones, and sets of the whole group, have no signal.
    assert compared == sum(completions - k for k in range(1, completions))


@pytest.mark.parametrize(
    ("right", "wrong", "k", "expected"),
    [
        # 3 of 6 pairs fail: mean and std are 1/2. A wrong one is in 3 pairs, 2 of which fail.
        (1, 3, 2, (0.5 / 0.5, (0.5 - 2 / 3) / 0.5)),
        # 1 of 10 sets fails: std is sqrt(0.09). A wrong one is in 6 sets, 1 of which fails.
        (2, 3, 3, (0.1 / 0.3, (0.1 - 1 / 6) / 0.3)),
        # GRPO's (r - mean) / std of the population, for rewards 1 1 0 0 0 0 0 0
        (2, 6, 1, (0.75 / sqrt(0.25 * 0.75), -0.25 / sqrt(0.25 * 0.75))),
        # Where all sets are alike there is no signal.
        (0, 8, 2, (0, 0)),  # none is right
        (8, 0, 2, (0, 0)),  # all are
        (7, 1, 2, (0, 0)),  # every pair has a right one
        (2, 2, 4, (0, 0)),  # there is one set
        (1, 1, 4, (0, 0)),  # there is none
        (0, 0, 1, (0, 0)),
    ],
)
def test_by_hand(right: int, wrong: int, k: int, expected: tuple[float, float]) -> None:
    assert passk_advantages(right, wrong, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 4, 100])
@pytest.mark.parametrize("right", [1, 37, 800])
def test_the_advantages_of_a_group_add_up_to_nothing(right: int, k: int) -> None:
    of_right, of_wrong = passk_advantages(right, 1024 - right, k)
    assert of_right > 0 > of_wrong
    assert right * of_right + (1024 - right) * of_wrong == pytest.approx(0, abs=1e-9 * right * of_right)


def test_the_harder_prompt_weighs_more_than_under_grpo() -> None:
    def strength(right: int, k: int) -> float:
        of_right, of_wrong = passk_advantages(right, 16 - right, k)
        return right * of_right - (16 - right) * of_wrong

    assert strength(8, 1) > strength(4, 1)  # strongest where half is right
    assert strength(4, 4) > strength(8, 4)


def scaled(
    rewards: list[list[float]], group_ids: list[int], weights: tuple[float, ...] = (1.0,), **params: float
) -> list[float]:
    scaler = PasskAdvantage(PasskAdvantageConfig(**params))
    return scaler.scale(torch.tensor(rewards), torch.tensor(weights), torch.tensor(group_ids)).tolist()


def test_groups_are_counted_by_themselves_in_any_order() -> None:
    # Group 7: one right of four. Group 3: one right of three. 1 of 3 pairs fails, and 1 of 2 with a wrong one.
    rewards = [[0.0], [1.0], [0.0], [1.0], [0.0], [0.0], [0.0]]
    advantages = scaled(rewards, [7, 3, 3, 7, 7, 3, 7], k=2)
    std = (1 / 3 * 2 / 3) ** 0.5
    right, wrong = (1 / 3) / std, (1 / 3 - 1 / 2) / std
    assert advantages == pytest.approx([-1 / 3, right, wrong, 1.0, -1 / 3, wrong, -1 / 3])


def test_a_completion_is_right_from_the_threshold_on() -> None:
    # 0.5 * 0.5 + 2 * 0.25 = 0.75, and the others less
    rewards = [[0.5, 0.25], [0.4, 0.25], [1.0, 0.0], [-1.0, 0.5]]
    assert scaled(rewards, [0] * 4, (0.5, 2.0), k=2, threshold=0.75) == pytest.approx([1.0] + [-1 / 3] * 3)


def test_how_far_a_reward_is_from_the_threshold_does_not_matter() -> None:
    assert scaled([[9.0], [0.3], [-5.0], [0.0]], [0] * 4, k=2) == pytest.approx([1.0] + [-1 / 3] * 3)


@pytest.mark.parametrize(
    ("right", "wrong", "params"), [(1.0, 0.0, {}), (-0.5, -2.0, {"threshold": -1})], ids=["zero", "below zero"]
)
def test_a_completion_that_nobody_scored_is_neither_right_nor_in_a_set(
    right: float, wrong: float, params: dict[str, float]
) -> None:
    advantages = scaled([[right], [NAN], [wrong], [wrong], [wrong]], [0] * 5, k=2, **params)
    assert advantages == pytest.approx([1.0, 0.0, -1 / 3, -1 / 3, -1 / 3])


def test_one_function_that_abstains_adds_nothing() -> None:
    rewards = [[NAN, 1.0], [0.0, 0.0], [0.0, NAN], [0.0, 0.0]]
    assert scaled(rewards, [0] * 4, (1.0, 1.0), k=2) == pytest.approx([1.0] + [-1 / 3] * 3)


def test_a_group_that_abstentions_leave_too_few_of_is_not_trained_on() -> None:
    assert scaled([[1.0], [0.0], [NAN], [NAN]], [0] * 4, k=3) == [0.0] * 4


def test_by_default_a_set_is_a_quarter_of_the_group() -> None:
    rewards = [[1.0]] * 3 + [[0.0]] * 13
    right, wrong = passk_advantages(3, 13, 4)
    assert scaled(rewards, [0] * 16) == pytest.approx([right] * 3 + [wrong] * 13)


@pytest.mark.parametrize("k", [4, 5])
def test_a_k_that_no_two_sets_of_a_group_have_is_refused_with_both_numbers(k: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"advantage\.k: a group of 4 completions has no two sets of k = {k}"
    ):
        scaled([[1.0], [0.0], [0.0], [0.0]], [0] * 4, k=k)


@pytest.mark.parametrize("params", [{"k": 0}, {"threshold": float("inf")}])
def test_a_parameter_out_of_bounds_is_refused_by_name(grpox_component, params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"advantage\.{next(iter(params))}"):
        grpox_component("advantage", "passk", **params)
