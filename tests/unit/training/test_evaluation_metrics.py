"""The metrics of an evaluation, of completions whose scores are known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from grpox.config import EvaluationConfig
from grpox.contracts import Episode, Rollout, Turn
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import ScoredRow
from grpox.training.evaluation import evaluation_metrics, outcomes_of, pass_at_k

Scores = tuple[float | None, ...]


def rows(*scores: Scores, samples: int = 1, failed: tuple[bool, ...] = (False, False)) -> list[ScoredRow]:
    """Completions of 1, 2, 3, ... tokens, the first of which runs into its longest length."""
    return [
        ScoredRow(
            Rollout(
                place // samples,
                place % samples,
                (1,),
                (2,) * (place + 1),
                "stop" if place else "length",
                0,
            ),
            each,
            failed,
            {},
        )
        for place, each in enumerate(scores)
    ]


def metrics(
    scored: list[ScoredRow], labels: tuple[str, ...] = ("math", "short"), **config: Any
) -> dict[str, float]:
    rewards = [NamedReward(label, len, weight) for label, weight in zip(labels, (1.0, 0.5), strict=False)]
    return evaluation_metrics(scored, rewards, EvaluationConfig(path="heldout.jsonl", **config))


def test_means_deviations_lengths_and_the_weighted_sum() -> None:
    found = metrics(rows((1.0, 0.0), (0.0, None), (1.0, 1.0), (0.0, 0.0)))
    assert found["accuracy"] == found["rewards/math/mean"] == 0.5
    assert found["rewards/math/std"] == pytest.approx((4 * 0.25 / 3) ** 0.5)
    assert (found["rewards/short/mean"], found["rewards/short/abstained"]) == (pytest.approx(1 / 3), 0.25)
    totals = [1.0, 0.0, 1.5, 0.0]
    assert found["reward"] == sum(totals) / 4
    assert found["reward_std"] == pytest.approx((sum((t - 0.625) ** 2 for t in totals) / 3) ** 0.5)
    assert (found["completions/mean_length"], found["completions/clipped_ratio"]) == (2.5, 0.25)
    assert not any(name.startswith("pass_at") for name in found)


def test_the_accuracy_is_that_of_the_reward_it_names() -> None:
    assert metrics(rows((1.0, 0.25)), accuracy="short")["accuracy"] == 0.25


def test_pass_at_k_counts_the_right_ones_of_each_prompt() -> None:
    scored = rows((1.0, 0), (0.0, 0), (0.5, 0), (0.0, 0), *[(0.0, 0)] * 4, samples=4)
    found = metrics(scored, num_generations=4, pass_at_k=[1, 2, 4])
    # One of four right, and none of four: C(3, 2) of C(4, 2) pairs have no right one.
    assert [found[f"pass_at_{k}"] for k in (1, 2, 4)] == [0.125, 0.25, 0.5]
    assert metrics(scored, num_generations=4, pass_at_k=[1], right_at=0.5)["pass_at_1"] == 0.25
    assert found["accuracy"] == 1.5 / 8


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_what_counting_every_choice_gives(n: int) -> None:
    for c in range(n + 1):
        right = [place < c for place in range(n)]
        for k in range(1, n + 1):
            choices = [any(chosen) for chosen in combinations(right, k)]
            assert pass_at_k([(n, c)], k) == sum(choices) / len(choices)


def test_pass_at_k_of_many_completions_is_exact() -> None:
    assert pass_at_k([(10_000, 1)], 5_000) == 0.5  # C(10000, 5000) has 3,009 digits
    assert pass_at_k([(1_000_000, 1)], 1) == 1e-6  # 1 minus a float next to 1 would keep ten digits of it
    assert pass_at_k([(200, 101)], 100) == 1.0  # fewer than k are wrong
    assert pass_at_k([(4, 1), (4, 4), (1, 1)], 2) == (0.5 + 1) / 2  # without a prompt of one completion


def test_completions_without_a_score_are_neither_right_nor_wrong() -> None:
    scored = rows((1.0, 0), (None, 0), (0.0, 0), (1.0, 0), samples=2)
    found = metrics(scored, num_generations=2, pass_at_k=[1, 2])
    assert found["pass_at_1"] == (1 + 0.5) / 2
    assert found["pass_at_2"] == 1.0  # of the second prompt alone


def test_what_nothing_scored_has_no_made_up_value() -> None:
    found = metrics(rows((None, None), (None, None)), pass_at_k=[1])
    assert "reward" not in found
    assert "rewards/math/std" not in found
    assert all(math.isnan(found[name]) for name in ("accuracy", "rewards/math/mean", "pass_at_1"))
    assert found["rewards/math/abstained"] == 1.0


def episodes(*infos: dict[str, Any]) -> list[ScoredRow]:
    """Completions of one turn each, whose environment reports these facts and a reward with a part ``mean``."""
    return [
        replace(
            row,
            rollout=replace(
                row.rollout,
                turns=(Turn(0, len(row.rollout.completion_ids), "stop", 0),),
                episode=Episode("calculator", (), rewards={"mean": 9.0}, info=info),
            ),
        )
        for row, info in zip(rows(*[(1.0, 0.0)] * len(infos)), infos, strict=True)
    ]


def test_success_and_other_results_of_episodes_are_metrics_and_hide_none() -> None:
    infos = [
        {"success": True, "calls_without_carry": False},
        {"success": False, "calls_without_carry": True},
        {"success": True},
        {},
    ]
    found = metrics(episodes(*infos), ("environment", "short"))
    assert found["success"] == 0.5
    assert found["info/calls_without_carry"] == 0.5
    assert found["turns/mean"] == 1
    assert (found["rewards/environment/mean"], found["rewards/environment/part_mean"]) == (1.0, 9.0)
    assert "success" not in metrics(rows((1.0, 0.0)))
    assert not any(name.startswith(("turns/", "episodes/", "info/")) for name in metrics(rows((1.0, 0.0))))


def test_the_summary_names_results_by_when_they_were_measured() -> None:
    before = {"accuracy": 0.1, "success": 0.2, "info/calls_without_carry": 0.9, "turns/mean": 3.0}
    after = {"accuracy": 0.8, "success": 0.7, "info/calls_without_carry": 0.05, "info/accuracy": 4.0}
    assert outcomes_of(before, after) == {
        "accuracy_before": 0.1,
        "success_before": 0.2,
        "calls_without_carry_before": 0.9,
        "accuracy_after": 0.8,  # not what an environment calls so
        "success_after": 0.7,
        "calls_without_carry_after": 0.05,
    }
    by_name = outcomes_of({"rewards/size/mean": 0.1, "rewards/size/std": 1.0}, {"rewards/size/mean": 0.2})
    assert by_name == {"rewards/size/mean_before": 0.1, "rewards/size/mean_after": 0.2}
    assert outcomes_of({"accuracy": 0.1}, {"accuracy": 0.2}) == {"accuracy_before": 0.1, "accuracy_after": 0.2}
