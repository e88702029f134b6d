"""Completions that the policy has moved away from: worked by hand, with unknown numbers, and at the bounds."""

from __future__ import annotations

import math

import pytest
import torch

from grpox.update.token_masks import off_policy_keep

MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
LOGPROBS = torch.tensor([[-2.0, -3.0, 0.0], [-1.0, -1.0, -4.0], [0.0, 0.0, 0.0]])
SAMPLER = torch.tensor([[-1.0, -2.5, math.nan], [-1.0, -1.5, -3.0], [0.0, 0.0, 0.0]])
"""Differences [1, 0.5] and [0, -0.5, 1]: 0.75 and 1/6 nats per token."""


def kept(advantages: list[float], threshold: float, sampler: torch.Tensor | None = SAMPLER) -> list[bool]:
    """Tell for each completion whether it is kept; it is kept or dropped as a whole."""
    keep = off_policy_keep(LOGPROBS, sampler, torch.tensor(advantages), MASK, threshold)
    assert (keep == keep[:, :1]).all()
    return keep[:, 0].tolist()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.8, [True, True, True]), (0.75, [True, True, True]), (0.7, [False, True, True])],
)
def test_by_hand(threshold: float, expected: list[bool]) -> None:
    assert kept([-1.0, -1.0, -1.0], threshold) == expected


def test_both_are_left_out_below_their_distances() -> None:
    assert kept([-1.0, -1.0, -1.0], 0.1) == [False, False, True]


def test_what_has_no_negative_advantage_is_kept_however_far() -> None:
    assert kept([0.0, 2.0, -1.0], 0.0) == [True, True, True]


def test_the_distance_has_a_sign() -> None:
    """No completion is dropped that the policy considers more likely than the generator did."""
    keep = off_policy_keep(SAMPLER.nan_to_num(), LOGPROBS, -torch.ones(3), MASK, 0.0)
    assert keep[:, 0].tolist() == [True, True, True]


def test_a_number_that_is_not_known_counts_as_no_distance() -> None:
    sampler = SAMPLER.clone()
    sampler[0, 0] = math.nan
    # 0.5 nats over two tokens
    assert kept([-1.0] * 3, 0.25, sampler) == [True, True, True]
    assert kept([-1.0] * 3, 0.24, sampler) == [False, True, True]
    assert kept([-1.0] * 3, 0.0, None) == [True, True, True]


def test_a_log_probability_that_is_nan_is_left_to_the_loss_to_tell() -> None:
    logprobs = LOGPROBS.clone()
    logprobs[0, 1] = math.nan
    keep = off_policy_keep(logprobs, SAMPLER, -torch.ones(3), MASK, 0.0)
    assert keep[0].all()


def test_it_has_no_gradient_and_masked_positions_no_say() -> None:
    logprobs = LOGPROBS.clone().requires_grad_(True)
    dirty = torch.where(MASK, SAMPLER, torch.tensor(1e30))
    keep = off_policy_keep(logprobs, dirty, -torch.ones(3), MASK, 0.7)
    assert keep[:, 0].tolist() == [False, True, True]
    assert not keep.requires_grad
