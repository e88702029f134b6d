"""The reward of a completion over functions that may abstain."""

from __future__ import annotations

import math

import pytest
import torch

from grpox.rollout.rewards.scoring import weighted_sum
from grpox_advantages.configs import GroupConfig
from grpox_advantages.scalers import Group

NAN = math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_abstaining_functions_are_left_out_and_the_rest_not_reweighted(dtype: torch.dtype) -> None:
    # 1*2 + 0.5*4 = 4; 1*2 alone = 2, not 2 / (1/1.5); 0.5*4 alone = 2; none
    rewards = torch.tensor([[2, 4], [2, NAN], [NAN, 4], [NAN, NAN]], dtype=dtype)

    total = weighted_sum(rewards, torch.tensor([1.0, 0.5], dtype=dtype))

    assert total.dtype == torch.float64
    assert total[:3].tolist() == [4.0, 2.0, 2.0]
    assert total[3].isnan()


def test_a_weight_of_zero_scores_all_the_same() -> None:
    # The function did not abstain: the row counts in its group, with reward 0.
    assert weighted_sum(torch.tensor([[3.0]]), torch.tensor([0.0])).tolist() == [0.0]


def test_rows_with_equal_rewards_have_sums_equal_to_the_bit() -> None:
    row = torch.rand(1, 37, generator=torch.Generator().manual_seed(0))
    total = weighted_sum(row.repeat(1001, 1), torch.rand(37, generator=torch.Generator().manual_seed(1)))

    assert len(total.unique()) == 1


def test_the_sum_is_taken_in_float64() -> None:
    # In float32 2^24 + 1 is 2^24.
    assert weighted_sum(torch.tensor([[2.0**24, 1.0]]), torch.ones(2)).tolist() == [2.0**24 + 1]


def test_terms_that_cancel_but_for_rounding_add_up_to_0() -> None:
    rewards, weights = torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([0.1, -0.3])
    assert weighted_sum(rewards, weights).tolist() == [0, 0]
    scaled = Group(GroupConfig(eps=0)).scale(rewards, weights, torch.tensor([0, 0]))
    assert scaled.tolist() == [0, 0]
