"""The closed form: worked by hand, and against every set of k completions."""

from __future__ import annotations

from itertools import combinations
from math import sqrt
from statistics import fmean, pstdev

import pytest

from grpox_passk.closed_form import passk_advantages


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


@pytest.mark.parametrize(
    ("right", "wrong", "k"),
    [
        (0, 8, 2),  # none is right
        (8, 0, 2),  # all are
        (7, 1, 2),  # every pair holds a right one
        (2, 2, 4),  # there is one set
        (1, 1, 4),  # there is none
        (0, 0, 1),
    ],
)
def test_where_all_sets_are_alike_there_is_no_signal(right: int, wrong: int, k: int) -> None:
    assert passk_advantages(right, wrong, k) == (0.0, 0.0)


def test_the_harder_prompt_weighs_more_than_under_grpo() -> None:
    def strength(right: int, k: int) -> float:
        of_right, of_wrong = passk_advantages(right, 16 - right, k)
        return right * of_right - (16 - right) * of_wrong

    assert strength(8, 1) > strength(4, 1)  # strongest where half is right
    assert strength(4, 4) > strength(8, 4)
