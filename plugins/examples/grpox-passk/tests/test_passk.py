"""How completions are told right from wrong and counted."""

from __future__ import annotations

import pytest
import torch
from grpox.errors import ConfigError

from grpox_passk.advantage import PasskAdvantage
from grpox_passk.closed_form import passk_advantages
from grpox_passk.config import PasskAdvantageConfig

NAN = float("nan")


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
    far, near = ([[9.0], [0.3], [-5.0], [0.0]], [[1.0], [0.0], [0.0], [0.0]])
    assert scaled(far, [0] * 4, k=2) == scaled(near, [0] * 4, k=2)


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
    with pytest.raises(ConfigError) as refused:
        scaled([[1.0], [0.0], [0.0], [0.0]], [0] * 4, k=k)
    assert "advantage.k" in str(refused.value)
    assert f"a group of 4 completions has no two sets of k = {k}" in str(refused.value)


@pytest.mark.parametrize("params", [{"k": 0}, {"threshold": float("inf")}])
def test_a_parameter_out_of_bounds_is_refused_by_name(grpox_component, params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"advantage\.{next(iter(params))}"):
        grpox_component("advantage", "passk", **params)
