"""pass@k is the share of all choices of k completions that hold a right one."""

from __future__ import annotations

import math
from itertools import combinations
from math import prod

import pytest

from grpox.training.evaluation import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_it_is_what_counting_every_choice_gives(n: int) -> None:
    for c in range(n + 1):
        right = [place < c for place in range(n)]
        for k in range(1, n + 1):
            choices = [any(chosen) for chosen in combinations(right, k)]
            assert pass_at_k(n, c, k) == sum(choices) / len(choices)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (10_000, 1, 5_000, 0.5),  # C(10000, 5000) has 3,009 digits
        (1_000_000, 1, 1, 1e-6),  # 1 minus a float next to 1 would keep ten digits of it
        (200, 0, 100, 0.0),
        (200, 101, 100, 1.0),  # fewer than k are wrong
        (5, 3, 1, 0.6),
    ],
)
def test_numbers_worked_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == expected


def test_it_is_the_papers_product() -> None:
    n, c, k = 200, 7, 10
    product = 1 - prod(1 - k / i for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(product, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_numbers_that_do_not_fit_together_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} completions"):
        pass_at_k(n, c, k)


def test_prompts_with_too_few_completions_are_left_out_of_the_mean() -> None:
    assert mean_pass_at_k([(4, 1), (4, 4), (1, 1)], 2) == (0.5 + 1) / 2
    assert math.isnan(mean_pass_at_k([(1, 1)], 2))
