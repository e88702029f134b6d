"""Advantages against a reference in plain floats, and where there is no signal."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError

from grpox.contracts import AdvantageScaler
from grpox_advantages.configs import GroupConfig, ScaledConfig
from grpox_advantages.scalers import Batch, Centred, Group

NAN = math.nan
EXACT = GroupConfig(eps=0.0, ddof=0)


def scale(
    scaler: AdvantageScaler,
    rewards: Sequence[float] | Sequence[Sequence[float]],
    group_ids: Sequence[int],
    weights: Sequence[float] = (1.0,),
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    matrix = torch.tensor(rewards, dtype=dtype).reshape(len(group_ids), len(weights))
    advantages = scaler.scale(matrix, torch.tensor(weights, dtype=dtype), torch.tensor(group_ids))
    assert advantages.dtype == torch.float32
    assert advantages.shape == (len(group_ids),)
    return advantages.tolist()


def reference(
    kind: str, rewards: Sequence[Sequence[float]], weights: Sequence[float], ids: Sequence[int], eps: float
) -> list[float]:
    """One row after another, with ddof 1."""
    sums: list[float | None] = []
    for row in rewards:
        terms = [w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)]
        sums.append(sum(terms) if terms else None)
    everyone = [r for r in sums if r is not None]
    advantages = []
    for r, group in zip(sums, ids, strict=True):
        members = [s for s, g in zip(sums, ids, strict=True) if g == group and s is not None]
        if r is None or len(members) < 2 or len(set(members)) == 1:
            advantages.append(0.0)
            continue
        divisors = {
            "group": lambda members=members: statistics.stdev(members) + eps,
            "batch": lambda: statistics.stdev(everyone) + eps,
            "none": lambda: 1.0,
        }
        advantages.append((r - statistics.fmean(members)) / divisors[kind]())
    return advantages


SCALERS = {"group": Group(GroupConfig()), "batch": Batch(ScaledConfig()), "none": Centred()}
each_scaler = pytest.mark.parametrize("kind", SCALERS)


@each_scaler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ragged_scattered_groups_with_abstentions(kind: str, dtype: torch.dtype) -> None:
    draw = random.Random(7)
    # Sixteenths are exact in float32, so that both sides see the same rewards.
    rewards = [[draw.choice([NAN, draw.randint(-32, 32) / 16]) for _ in range(2)] for _ in range(60)]
    ids = [draw.choice([3, 70, -2, 11, 12, 500, 501, 502]) for _ in range(60)]

    advantages = scale(SCALERS[kind], rewards, ids, (1.0, 0.5), dtype)

    assert advantages == pytest.approx(reference(kind, rewards, (1.0, 0.5), ids, 1e-4), rel=1e-6, abs=1e-6)
    assert sum(a != 0 for a in advantages) > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hand_worked_two_groups(dtype: torch.dtype) -> None:
    # Groups (0, 2) and (1, 5): means 1 and 3, deviations -1, 1, -2, 2. Standard deviations with ddof 0:
    # 1 and 2 within the groups; over 0, 2, 1, 5 the mean is 2 and the variance (4 + 0 + 1 + 9) / 4 = 3.5.
    rewards, ids = [0.0, 2.0, 1.0, 5.0], [0, 0, 1, 1]
    batch = [d / math.sqrt(3.5) for d in (-1, 1, -2, 2)]

    assert scale(Group(EXACT), rewards, ids, dtype=dtype) == pytest.approx([-1, 1, -1, 1])
    assert scale(Batch(EXACT), rewards, ids, dtype=dtype) == pytest.approx(batch)
    assert scale(SCALERS["none"], rewards, ids, dtype=dtype) == [-1, 1, -2, 2]


def test_eps_is_added_to_the_standard_deviation() -> None:
    # Standard deviation 1 (ddof 0), eps 1: half. In the square root it would be 1 / sqrt(2).
    assert scale(Group(GroupConfig(eps=1.0, ddof=0)), [0.0, 2.0], [0, 0]) == [-0.5, 0.5]
    assert scale(Batch(ScaledConfig(eps=1.0, ddof=0)), [0.0, 2.0], [0, 0]) == [-0.5, 0.5]


def test_ddof_is_one_by_default() -> None:
    # Sample standard deviation of 0 and 2: sqrt(2).
    config = GroupConfig(eps=0.0)
    for scaler in (Group(config), Batch(config)):
        assert scale(scaler, [0.0, 2.0], [0, 0]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_equal_but_for_rounding_are_equal(dtype: torch.dtype) -> None:
    # 0.1 + 0.2 is not 0.3 in floating point.
    assert scale(Group(EXACT), [[0.1, 0.2], [0.3, 0.0]], [0, 0], (1.0, 1.0), dtype) == [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1000.0, 1000.01], [1e-9, 2e-9]])
def test_real_differences_are_kept_however_small(rewards: list[float]) -> None:
    # 1000 and 1000.01 are 160 float32 steps apart.
    assert scale(Group(EXACT), rewards, [0, 0]) == pytest.approx([-1.0, 1.0])


@each_scaler
def test_advantages_of_a_group_add_up_to_zero(kind: str) -> None:
    assert sum(scale(SCALERS[kind], [0.3, 1.7, -2.2, 0.9], [5, 5, 5, 5])) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("parameters", [{"eps": -1e-4}, {"ddof": 2}, {"epsilon": 0.1}])
def test_refused_parameters(parameters: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScaledConfig.model_validate(parameters)
    assert ScaledConfig().model_dump() == {"eps": 1e-4, "ddof": 1}
