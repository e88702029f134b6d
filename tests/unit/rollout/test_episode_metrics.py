"""Metrics of episodes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpox.contracts import FINISH_REASONS, Episode, Rollout, ToolCall, ToolResult, Turn
from grpox.rollout.metrics import SUCCESS_RATE, episode_metrics, length_metrics


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


def test_completions_of_one_turn_have_no_metrics_of_episodes() -> None:
    assert episode_metrics([Rollout(0, 0, (1,), (2, 3), "stop", 0)]) == {}


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
    assert length_metrics([episode(2, "budget", 9), episode(2)])["completions/clipped_ratio"] == 0.5


def test_turns_of_a_generator_without_environment_are_counted_too() -> None:
    rollout = Rollout(0, 0, (1,), (2, 3), "stop", 0, turns=(Turn(0, 1, "stop", 0), Turn(1, 2, "stop", 0)))
    metrics = episode_metrics([rollout])
    assert metrics["turns/mean"] == 2.0
    assert not any(name.startswith(("tools/", "info/")) for name in metrics)


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
