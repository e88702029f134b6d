"""Signals of rewards for the alarms, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpox.rollout.advantages import Advantages
from grpox.rollout.collector import Collector
from grpox.rollout.metrics import reward_signals

NAN = math.nan


def test_variances_within_groups_by_hand() -> None:
    # Two groups of two. exact: deviations -.5 .5 and 0 0. form, weight 2: -1 1 and 1 -1 after the weight.
    rewards = torch.tensor([[0.0, 1.0], [1.0, 2.0], [1.0, 8.0], [1.0, 7.0]])
    totals = torch.tensor([2.0, 5.0, 17.0, 15.0])
    assert reward_signals(["exact", "form"], rewards, totals, torch.tensor([1.0, 2.0]), 2) == {
        "alarms/highest": 17.0,
        "alarms/lowest": 2.0,
        "alarms/differs/exact": 0.5,
        "alarms/share/exact": pytest.approx(0.5 / 4.5),
        "alarms/differs/form": 1.0,
        "alarms/share/form": pytest.approx(4.0 / 4.5),
    }


def test_abstained_scores_and_weights_of_zero_are_left_out() -> None:
    rewards = torch.tensor([[0.0, 5.0, 1.0], [NAN, 6.0, 1.0], [2.0, 7.0, 1.0]])
    signals = reward_signals(
        ["a", "off", "b"], rewards, torch.tensor([0.0, NAN, 2.0]), torch.tensor([1.0, 0, 1]), 3
    )
    assert signals == {
        "alarms/highest": 2.0,
        "alarms/lowest": 0.0,
        "alarms/differs/a": 1.0,
        "alarms/share/a": 1.0,
        "alarms/differs/b": 0.0,
        "alarms/share/b": 0.0,
    }


def test_rounding_is_no_variance() -> None:
    rewards = torch.tensor([[0.1, 1.0], [0.1 + 1e-8, 1.0]])
    signals = reward_signals(["a", "b"], rewards, rewards.sum(dim=1), torch.ones(2), 2)
    assert (signals["alarms/differs/a"], "alarms/share/a" in signals) == (0.0, False)


def test_one_function_has_no_share() -> None:
    signals = reward_signals(["a"], torch.tensor([[0.0], [1.0]]), torch.tensor([0.0, 1.0]), torch.ones(1), 2)
    assert signals == {"alarms/highest": 1.0, "alarms/lowest": 0.0}
    assert reward_signals(["a"], torch.tensor([[NAN]]), torch.tensor([NAN]), torch.ones(1), 1) == {}


@pytest.mark.parametrize("of_tokens", [False, True])
def test_groups_whose_advantages_are_all_0_are_counted(of_tokens: bool) -> None:
    # With advantages of tokens, a mean of 0 is not 0 for each of them.
    values = torch.tensor([0.0, 0.0, 1.0, 0.0])
    tokens = [torch.zeros(2), torch.tensor([1.0, -1.0]), torch.zeros(1), torch.zeros(3)]
    scaled = Advantages(values, tokens if of_tokens else None)
    collector: Any = SimpleNamespace(
        scorer=SimpleNamespace(rewards=[]), num_generations=2, signal="functions", weights=torch.ones(0)
    )
    rewards, totals = torch.zeros(4, 0), torch.full((4,), NAN)
    batch: Any = SimpleNamespace(scaled=scaled, rewards=rewards, totals=totals, rows=(), dropped=())
    assert Collector.signals(collector, batch) == {"alarms/no_advantage": 0.5}
    batch.scaled = Advantages(torch.zeros(4), tokens if of_tokens else None)
    assert Collector.signals(collector, batch) == {"alarms/no_advantage": 0.5 if of_tokens else 1.0}
