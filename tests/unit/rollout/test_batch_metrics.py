"""Metrics of a generation batch: of episodes and, for the alarms, of rewards; by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpox.contracts import FINISH_REASONS, Episode, Rollout, ToolCall, ToolResult, Turn
from grpox.rollout.advantages import Advantages
from grpox.rollout.collector import Collector
from grpox.rollout.metrics import (
    SUCCESS_RATE,
    episode_metrics,
    length_metrics,
    reward_metrics,
    reward_signals,
)

NAN = math.nan


def episode(turns: int, reason: str = "stop", observed: int = 0, **fields: Any) -> Rollout:
    """Each turn two tokens, and `observed` tokens between two turns."""
    mask: list[bool] = []
    spans = []
    for number in range(turns):
        mask += [False] * observed if number else []
        spans.append(Turn(len(mask), len(mask) + 2, "stop", 0))
        mask += [True, True]
    ids = tuple(range(len(mask)))
    label = fields.pop("environment", "calculator")
    conversation = Episode(label, ({"role": "assistant", "content": ""},), **fields)
    return Rollout(0, 0, (1,), ids, reason, 0, model_mask=tuple(mask), turns=tuple(spans), episode=conversation)


def call(name: str, failure: Any = "") -> ToolResult:
    return ToolResult(ToolCall(name, "{}"), "", failure)


def test_turns_ends_and_observed_tokens() -> None:
    rollouts = [
        episode(1),
        episode(3, "turns", 5),
        episode(2, "stop", 4, cut=2),
        episode(2, "odd", 0, lost="killed"),
    ]
    metrics = episode_metrics(rollouts)
    assert (metrics["turns/mean"], metrics["turns/min"], metrics["turns/max"]) == (2.0, 1.0, 3.0)
    assert metrics["episodes/observation_tokens"] == (0 + 10 + 4 + 0) / 4
    assert (metrics["episodes/lost"], metrics["episodes/cut_answers"]) == (1.0, 2.0)
    ends = {name.rpartition("/")[2]: value for name, value in metrics.items() if "ended_by" in name}
    assert ends == {**dict.fromkeys(FINISH_REASONS, 0.0), "stop": 0.5, "turns": 0.25, "odd": 0.25}
    # Lengths are those of the model's own tokens.
    assert length_metrics(rollouts)["completions/mean_length"] == 4.0
    lengths = length_metrics([episode(3, "budget", 9), episode(2), episode(4, "length")])
    assert lengths == {
        "completions/mean_length": 6.0,
        "completions/min_length": 4.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": pytest.approx(2 / 3),
        **{f"completions/{name}_terminated_length": 4.0 for name in ("mean", "min", "max")},
    }
    ended = length_metrics([episode(1), episode(3), episode(2)])
    assert [ended[f"completions/{name}_terminated_length"] for name in ("min", "max")] == [2.0, 6.0]


def test_turns_of_a_generator_without_environment_are_counted_too() -> None:
    rollout = Rollout(0, 0, (1,), (2, 3), "stop", 0, turns=(Turn(0, 1, "stop", 0), Turn(1, 2, "stop", 0)))
    metrics = episode_metrics([rollout])
    assert metrics["turns/mean"] == 2.0
    assert not any(name.startswith(("tools/", "info/")) for name in metrics)
    assert episode_metrics([Rollout(0, 0, (1,), (2, 3), "stop", 0)]) == {}


def test_calls_are_counted_by_tool_and_names_that_no_tool_has_together() -> None:
    results = (
        call("add"),
        call("add", "timeout"),
        call("add", "arguments"),
        call("made/up", "unknown"),
        call("", "arguments"),
    )
    metrics = episode_metrics(
        [episode(1, results=results), episode(1, results=(call("look"), call("x", "unknown")))]
    )
    assert {name: value for name, value in metrics.items() if name.startswith("tools/")} == {
        "tools/add/calls": 3.0,
        "tools/add/failures": 2.0,
        "tools/add/timeouts": 1.0,
        "tools/look/calls": 1.0,
        "tools/look/failures": 0.0,
        "tools/look/timeouts": 0.0,
        "tools/unknown_names": 3.0,
    }


def test_success_is_a_share_of_all_episodes_of_environments_that_report_it() -> None:
    rollouts = [
        episode(1, info={"success": True}),
        episode(1, info={"success": False}),
        episode(1, info={}, lost="killed"),  # no success, though it could not say so
        episode(1, info={"success": True}, failure="raised ValueError in reward"),  # nor is this
        episode(1, info={"success": True}),
        episode(1, environment="chat", info={"words": 3}),  # reports none in any episode
    ]
    assert episode_metrics(rollouts)[SUCCESS_RATE] == 2 / 5
    assert SUCCESS_RATE not in episode_metrics(rollouts[5:])


def test_numbers_and_truth_values_of_info_are_averaged_over_the_episodes_that_have_them() -> None:
    infos: list[dict[str, Any]] = [
        {"calls_without_carry": True, "guesses": 3, "success": True, "name": "a"},
        {"calls_without_carry": False, "guesses": 6, "distance": float("nan"), "list": [1]},
        {"guesses": 3.0, "distance": 2.5, "none": None},
    ]
    metrics = episode_metrics([episode(1, info=info) for info in infos])
    assert {name: value for name, value in metrics.items() if name.startswith("info/")} == {
        "info/calls_without_carry": 0.5,
        "info/distance": 2.5,
        "info/guesses": 4.0,
    }


def test_parts_of_the_environments_reward_are_metrics_that_hide_none_of_the_function() -> None:
    rollouts = [
        episode(1, rewards={"right": 1.0, "mean": 4.0}, weight=0.5),
        episode(1, rewards={"right": 0.0}),
        episode(1, rewards={"": 9.0}),
        episode(1, rewards=None),
    ]
    metrics = episode_metrics(rollouts)
    assert {name: value for name, value in metrics.items() if name.startswith("rewards/")} == {
        "rewards/environment/part_mean": pytest.approx(2.0),
        "rewards/environment/right": 0.25,
    }


# -- Signals for the alarms ------------------------------------------------------------------------------


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


def test_means_of_rewards_are_of_the_scored_completions_alone() -> None:
    rewards = torch.tensor([[1.0, NAN], [3.0, 2.0], [NAN, NAN], [5.0, 2.0]], dtype=torch.float64)
    metrics = reward_metrics(["a", "b"], rewards, torch.tensor([1.0, 5.0, NAN, 7.0]), 2)
    assert metrics == {
        "rewards/a/mean": 3.0,
        "rewards/a/std": 2.0,
        "rewards/a/abstained": 0.25,
        "rewards/b/mean": 2.0,
        "rewards/b/std": 0.0,
        "rewards/b/abstained": 0.5,
        "reward": pytest.approx(13 / 3),
        "reward_std": pytest.approx((28 / 3) ** 0.5),  # deviations -10/3, 2/3 and 8/3
        "frac_reward_zero_std": 0.5,  # of the second group one completion has a score
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
