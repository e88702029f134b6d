"""Advantages of completions: numbers worked by hand, a reference in plain floats, and where there is no signal.

The conformance suite checks what holds for every advantage: orders and numbers of groups, abstentions, weights.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import grpox
from grpox.contracts import AdvantageInputs, Turn
from grpox.errors import ConfigError
from grpox.toolkit import weighted_sum
from grpox_advantages.baselines import rank_of

NAN = math.nan
Matrix = Sequence[float] | Sequence[Sequence[float]]
EXACT: dict[str, Any] = {"eps": 0.0, "ddof": 0}
GDPO: dict[str, Any] = EXACT | {"aggregation": "normalize_then_sum"}
EVERY: dict[str, dict[str, Any]] = {
    "group": EXACT,
    "batch": EXACT,
    "none": {},
    "rloo": {},
    "reinforce_plus_plus": {"eps": 0.0},
    "maxrl": {},
    "opo": {},
    "quantile": {"eps": 0.0},
}
each = pytest.mark.parametrize("name", EVERY)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def scale(
    name: str,
    parameters: dict[str, Any],
    rewards: Matrix,
    ids: Sequence[int],
    weights: Sequence[float] = (1.0,),
    lengths: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Advantages of completions of `lengths` tokens, else of 1."""
    scaler = grpox.build("advantage", name, parameters)
    matrix = torch.tensor(rewards, dtype=dtype).reshape(len(ids), len(weights))
    factors, groups = torch.tensor(weights, dtype=dtype), torch.tensor(ids)
    if name == "opo":
        counts = list(lengths) or [1] * len(ids)
        inputs = AdvantageInputs(
            rewards=matrix,
            weights=factors,
            group_ids=groups,
            prompt_ids=groups,
            lengths=torch.tensor(counts),
            model_masks=[torch.ones(n, dtype=torch.bool) for n in counts],
            columns={},
            step=1,
            turns=[(Turn(0, n, "stop", 0),) for n in counts],
        )
        advantages = scaler.scale(inputs)
    else:
        advantages = scaler.scale(matrix, factors, groups)
    assert (advantages.dtype, advantages.shape) == (torch.float32, (len(ids),))
    found: list[float] = advantages.tolist()
    return found


# -- Numbers by hand ---------------------------------------------------------------------------------------

TWO, PAIRS = (
    ([0.0, 2.0, 1.0, 5.0], [0, 0, 1, 1]),
    ([[0.0, 5.0], [2.0, 5.0], [0.0, 1.0], [1.0, 3.0]], [0, 0, 1, 1]),
)
PAPER = [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [0, 0, 1, 1]
ROOT = math.sqrt(0.5)


@both_dtypes
@pytest.mark.parametrize(
    ("name", "parameters", "rewards", "ids", "weights", "expected"),
    [
        # Groups (0, 2) and (1, 5): means 1 and 3, deviations -1, 1, -2, 2. Standard deviations with ddof 0: 1
        # and 2 within the groups; over 0, 2, 1, 5 the mean is 2 and the variance (4 + 0 + 1 + 9) / 4 = 3.5.
        ("group", EXACT, *TWO, [1.0], [-1, 1, -1, 1]),
        ("batch", EXACT, *TWO, [1.0], [d / math.sqrt(3.5) for d in (-1, 1, -2, 2)]),
        ("none", {}, *TWO, [1.0], [-1, 1, -2, 2]),
        # Deviation 1 plus eps 1; inside of the root it would be sqrt(2). By default ddof is 1: sqrt(2).
        ("group", {"eps": 1.0, "ddof": 0}, [0.0, 2.0], [0, 0], [1.0], [-0.5, 0.5]),
        ("batch", {"eps": 1.0, "ddof": 0}, [0.0, 2.0], [0, 0], [1.0], [-0.5, 0.5]),
        ("group", {"eps": 0.0}, [0.0, 2.0], [0, 0], [1.0], [-ROOT, ROOT]),
        ("batch", {"eps": 0.0}, [0.0, 2.0], [0, 0], [1.0], [-ROOT, ROOT]),
        # 0.1 + 0.2 is not 0.3 in floating point, and 0.1 * 3 - 0.3 * 1 not 0.
        ("group", EXACT, [[0.1, 0.2], [0.3, 0.0]], [0, 0], [1.0, 1.0], [0, 0]),
        ("group", EXACT, [[3.0, 1.0], [0.0, 0.0]], [0, 0], [0.1, -0.3], [0, 0]),
        # 1000 and 1000.01 are 160 float32 steps apart.
        ("group", EXACT, [1000.0, 1000.01], [0, 0], [1.0], [-1, 1]),
        ("group", EXACT, [1e-9, 2e-9], [0, 0], [1.0], [-1, 1]),
        # Each function by itself: 0, 2 -> -1, 1 and 5, 5 -> 0, 0; 0, 1 -> -1, 1 and 1, 3 -> -1, 1. Sums with
        # weights 1 and 0.5: -1, 1, -1.5, 1.5, of mean 0 and variance (1 + 1 + 2.25 + 2.25) / 4 = 1.625.
        ("group", GDPO, *PAIRS, [1.0, 0.5], [s / math.sqrt(1.625) for s in (-1, 1, -1.5, 1.5)]),
        # The paper's case: sums 0, 1 and 0, 2 are -1, 1 each, and decoupled -1, 1 and -2, 2 over sqrt(2.5).
        ("group", EXACT, *PAPER, [1.0, 1.0], [-1, 1, -1, 1]),
        ("group", GDPO, *PAPER, [1.0, 1.0], [s / math.sqrt(2.5) for s in (-1, 1, -2, 2)]),
        # eps counts twice: -1, 1 over 1 + 1 are -0.5, 0.5, of deviation 0.5: over 0.5 + 1 they are -1/3, 1/3.
        ("group", GDPO | {"eps": 1.0}, [[0.0], [2.0]], [0, 0], [1.0], [-1 / 3, 1 / 3]),
        # And so does ddof: -1, 0, 1 have sample deviation 1; the six sums -1, 0, 1, -1, 0, 1 have sqrt(4 / 5).
        (
            "group",
            GDPO | {"ddof": 1},
            [1.0, 2.0, 3.0, 10.0, 20.0, 30.0],
            [0, 0, 0, 1, 1, 1],
            [1.0],
            [s / math.sqrt(0.8) for s in (-1, 0, 1, -1, 0, 1)],
        ),
        # 1, 3 of mean 2 and deviation 1 -> -1, 1; a single score -> 0; a row without any: sums -1, 0, 1.
        (
            "group",
            GDPO,
            [[1.0, NAN], [NAN, 4.0], [3.0, NAN], [NAN, NAN]],
            [0] * 4,
            [1.0, 1.0],
            [-math.sqrt(1.5), 0, math.sqrt(1.5), 0],
        ),
        # A group without signal stays at 0: the mean over the batch is 0 by construction.
        (
            "group",
            GDPO,
            [[0.1, 0.3]] * 3 + [[0.0, 1.0], [2.0, 1.5]],
            [0, 0, 0, 1, 1],
            [1.0, 1.0],
            [0, 0, 0, -2 / math.sqrt(1.6), 2 / math.sqrt(1.6)],
        ),
        # Terms that cancel but for rounding.
        ("group", GDPO, [[0.3] * 3, [0.1] * 3, [0.7] * 3], [0] * 3, [0.1, 0.2, -0.3], [0, 0, 0]),
        # Of 1, 2, 6 the means of the others are 4, 3.5 and 1.5; of 0, 1 they are 1 and 0.
        ("rloo", {}, [1.0, 0.0, 2.0, 1.0, 6.0], [0, 1, 0, 1, 0], [1.0], [-3, -1, -1.5, 1, 4.5]),
        # Deviations -1, 1, -2, 2, whose squares add up to 10: sqrt(10 / 4). That of the rewards is above 50.
        (
            "reinforce_plus_plus",
            EXACT,
            [0.0, 2.0, 101.0, 105.0],
            [0, 0, 1, 1],
            [1.0],
            [d / math.sqrt(2.5) for d in (-1, 1, -2, 2)],
        ),
        # By default with ddof 1: sqrt(2 / 1) + 0.5.
        (
            "reinforce_plus_plus",
            {"eps": 0.5},
            [0.0, 2.0],
            [0, 0],
            [1.0],
            [d / (math.sqrt(2) + 0.5) for d in (-1, 1)],
        ),
        # One right of four: mean 0.25, so (1 - 0.25) / 0.25 = 3 and -1. Three of four: 1/3 and -1.
        ("maxrl", {}, [0.0, 1.0, 0.0, 0.0], [5] * 4, [1.0], [-1, 3, -1, -1]),
        ("maxrl", {}, [1.0, 1.0, 0.0, 1.0], [5] * 4, [1.0], [1 / 3, 1 / 3, -1, 1 / 3]),
        # The quantile is one of the rewards 1, 2, 4, 9, never between two. Sum of squares around 4: 38.
        *(
            (
                "quantile",
                EXACT | {"q": q},
                [9.0, 1.0, 4.0, 2.0],
                [0] * 4,
                [1.0],
                [(r - baseline) / math.sqrt(38 / 4) for r in (9, 1, 4, 2)],
            )
            for q, baseline in ((0.1, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 4), (0.9, 9))
        ),
    ],
)
def test_by_hand(
    name: str,
    parameters: dict[str, Any],
    rewards: Matrix,
    ids: Sequence[int],
    weights: Sequence[float],
    expected: Sequence[float],
    dtype: torch.dtype,
) -> None:
    found = scale(name, parameters, rewards, ids, weights, dtype=dtype)
    assert found == pytest.approx(expected)
    assert [value for value, wanted in zip(found, expected, strict=True) if wanted == 0 and value != 0] == []


def test_opo_weighs_by_length() -> None:
    # Baseline (1 * 10 + 0 * 30) / 40 = 0.25, the plain mean is 0.5; second group: (2 * 1 + 4 * 3) / 4 = 3.5.
    advantages = scale("opo", {}, [1.0, 2.0, 0.0, 4.0], [0, 1, 0, 1], lengths=[10, 1, 30, 3])
    assert advantages == pytest.approx([0.75, -1.5, -0.25, 0.5])
    assert scale("opo", {}, [1.0, 2.0, 6.0], [0] * 3, lengths=[7] * 3) == pytest.approx([-2, -1, 3])
    assert scale("opo", {}, [1.0, NAN, 0.0], [0] * 3, lengths=[10, 90, 30]) == pytest.approx([0.75, 0, -0.25])


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("rloo", -1 / 3, 1), ("maxrl", -1, 3), ("opo", -0.5, 0.5), ("quantile", 0, 4 / math.sqrt(3))],
)
def test_the_group_that_the_docs_work_by_hand(name: str, wrong: float, right: float) -> None:
    parameters = EXACT if name == "quantile" else {}
    found = scale(name, parameters, [0.0, 0.0, 0.0, 1.0], [0] * 4, lengths=[10, 10, 10, 30])
    assert found == pytest.approx([wrong] * 3 + [right])


# -- A reference in plain floats ---------------------------------------------------------------------------


def standardised(value: float, among: Sequence[float]) -> float:
    """With ddof 1 and eps 1e-4."""
    if len(among) < 2 or len(set(among)) == 1:
        return 0.0
    return (value - statistics.fmean(among)) / (statistics.stdev(among) + 1e-4)


def reference(
    name: str, rewards: Sequence[Sequence[float]], weights: Sequence[float], ids: Sequence[int]
) -> Any:
    """One row after another."""
    rows, columns = range(len(rewards)), range(len(weights))
    sums = {}
    for row in rows:
        terms = [weights[k] * rewards[row][k] for k in columns if not math.isnan(rewards[row][k])]
        if name == "decoupled":
            group = [rewards[other] for other in rows if ids[other] == ids[row]]
            known = [[each[k] for each in group if not math.isnan(each[k])] for k in columns]
            scored = [k for k in columns if not math.isnan(rewards[row][k])]
            terms = [weights[k] * standardised(rewards[row][k], known[k]) for k in scored]
        if terms:
            sums[row] = sum(terms)
    advantages = []
    for row in rows:
        members = [sums[other] for other in sums if ids[other] == ids[row]]
        if name == "decoupled":
            advantages.append(standardised(sums[row], list(sums.values())) if row in sums else 0.0)
        elif row not in sums or len(members) < 2 or len(set(members)) == 1:
            advantages.append(0.0)
        elif name == "group":
            advantages.append(standardised(sums[row], members))
        else:
            difference = sums[row] - statistics.fmean(members)
            factors = {
                "none": 1.0,
                "batch": 1 / (statistics.stdev(sums.values()) + 1e-4),
                "rloo": len(members) / (len(members) - 1),
            }
            advantages.append(difference * factors[name])
    return advantages


@pytest.mark.parametrize("name", ["group", "batch", "none", "rloo", "decoupled"])
@both_dtypes
def test_ragged_scattered_groups_with_abstentions(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(7)
    # Sixteenths are exact in float32, so that both sides see the same rewards.
    rewards = [[draw.choice([NAN, draw.randint(-32, 32) / 16, 1.0]) for _ in range(3)] for _ in range(60)]
    ids = [draw.choice([3, 70, -2, 11, 12, 500, 501, 502]) for _ in range(60)]
    weights = (1.0, 0.5, -2.0)
    built, parameters = (name, {}) if name != "decoupled" else ("group", {"aggregation": "normalize_then_sum"})
    advantages = scale(built, parameters, rewards, ids, weights, dtype=dtype)
    assert advantages == pytest.approx(reference(name, rewards, weights, ids), rel=1e-6, abs=1e-6)
    assert sum(a != 0 for a in advantages) > 30


# -- Without signal ----------------------------------------------------------------------------------------


@each
@both_dtypes
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -0.3, 1e6 + 0.1, 1e-7])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_of_equal_rewards_is_exactly_zero(
    name: str, value: float, size: int, dtype: torch.dtype
) -> None:
    if name == "maxrl" and value < 0:
        return  # refused by name
    # The mean of three 0.1 is not 0.1, and a difference of rounding noise over itself would be 1.
    lengths, ids = [*range(1, size + 1), 1, 1], [0] * size + [1, 1]
    advantages = scale(name, EVERY[name], [value] * size + [0.0, 1.0], ids, lengths=lengths, dtype=dtype)
    assert advantages[:size] == [0.0] * size
    assert advantages[-2] <= 0 <= advantages[-1]
    assert any(advantages[size:])


@each
def test_a_group_with_fewer_than_two_scores_is_zero(name: str) -> None:
    assert scale(name, EVERY[name], [3.0, NAN, 5.0, NAN], [0, 0, 1, 2]) == [0.0] * 4
    if name != "opo":
        assert scale(name, EVERY[name], [], []) == []


@each
def test_a_row_on_which_every_function_abstained_is_zero_and_out_of_the_statistics(name: str) -> None:
    with_row = scale(name, EVERY[name], [1.0, NAN, 3.0, 8.0], [0] * 4, lengths=[2, 90, 3, 4])
    assert with_row.pop(1) == 0.0
    without = scale(name, EVERY[name], [1.0, 3.0, 8.0], [0] * 3, lengths=[2, 3, 4])
    assert with_row == pytest.approx(without, rel=1e-6, abs=1e-7)


# -- Quantiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", range(1, 10))
@pytest.mark.parametrize(("q", "most_of_hard"), [(0.2, 8), (0.4, 6), (0.5, 5), (0.6, 4), (0.7, 3)])
def test_quantile_reinforces_successes_of_hard_groups_and_punishes_failures_of_easy_ones(
    right: int, q: float, most_of_hard: int
) -> None:
    # q 0.4 of 10: with 6 right or fewer at least 4 are 0, and the baseline is 0; else it is 1. A larger q makes
    # more groups easy.
    rewards = [1.0] * right + [0.0] * (10 - right)
    baseline, std = 0.0 if right <= most_of_hard else 1.0, statistics.pstdev(rewards)
    advantages = scale("quantile", EXACT | {"q": q}, rewards, [0] * 10)
    assert advantages == pytest.approx([(r - baseline) / std for r in rewards])
    assert advantages.count(0.0) == (10 - right if right <= most_of_hard else right)


def test_rank_of_is_exact_where_floating_point_is_not() -> None:
    assert 0.07 * 100 > 7  # which alone would give the eighth
    assert rank_of(0.07, 100) == 6


# -- Rewards and parameters --------------------------------------------------------------------------------


def test_the_weighted_sum_of_rewards_leaves_out_functions_that_abstained() -> None:
    # 1*2 + 0.5*4 = 4; 1*2 alone = 2, not 2 / (1/1.5); 0.5*4 alone = 2; none; in float32 2^24 + 1 is 2^24.
    rewards = torch.tensor([[2, 4], [2, NAN], [NAN, 4], [2.0**24, 2], [NAN, NAN]])
    total = weighted_sum(rewards, torch.tensor([1.0, 0.5]))
    assert total.dtype == torch.float64
    assert total[:4].tolist() == [4.0, 2.0, 2.0, 2.0**24 + 1]
    assert total[4].isnan()
    # A weight of 0 scores all the same, and terms that cancel but for rounding add up to 0.
    assert weighted_sum(torch.tensor([[3.0]]), torch.tensor([0.0])).tolist() == [0.0]
    assert weighted_sum(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([0.1, -0.3])).tolist() == [0, 0]


def test_rows_with_equal_rewards_have_sums_equal_to_the_bit() -> None:
    row, weights = (torch.rand(37, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert len(weighted_sum(row.repeat(1001, 1), weights).unique()) == 1


def test_maxrl_refuses_negative_rewards_by_name() -> None:
    with pytest.raises(ValueError, match=r"maxrl .* below 0: -0\.5"):
        scale("maxrl", {}, [1.0, -0.5], [0, 0])


@pytest.mark.parametrize(
    ("name", "defaults", "refused"),
    [
        ("batch", {"eps": 1e-4, "ddof": 1}, {"eps": -1e-4, "ddof": 2, "epsilon": 0.1, "aggregation": "sum"}),
        ("group", {"eps": 1e-4, "ddof": 1, "aggregation": "sum_then_normalize"}, {"aggregation": "gdpo"}),
        ("quantile", {"eps": 1e-4, "ddof": 1, "q": 0.4}, {"q": 0.0}),
        ("quantile", {"eps": 1e-4, "ddof": 1, "q": 0.4}, {"q": 1.0}),
    ],
)
def test_parameters(name: str, defaults: dict[str, Any], refused: dict[str, Any]) -> None:
    assert grpox.build("advantage", name).config.model_dump() == defaults
    for key, value in refused.items():
        with pytest.raises(ConfigError) as caught:
            grpox.build("advantage", name, {key: value})
        assert [problem.key.split(".")[-1] for problem in caught.value.problems] == [key]
