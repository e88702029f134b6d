"""Calls the reward functions of a run: rewards[K][N] of a batch, or a failure that names the function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpox.contracts import Text
from grpox.errors import Problem, RunFailed, nearest
from grpox.rollout.rewards.log import extra_columns, logged_metrics
from grpox.rollout.rewards.named import NamedReward
from grpox.rollout.rewards.outcome import Outcome
from grpox.rollout.rewards.stop import StopSign
from grpox.rollout.rewards.together import call_together


@dataclass(frozen=True)
class RewardTable:
    """The scores of `N` completions by `K` reward functions, and what the functions logged."""

    values: list[list[float | None]]
    """[K][N]; None where the function abstained."""
    failed: list[list[bool]]
    """[K][N]; True where it abstained because it failed."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """From `log_metric`: name -> label -> the mean over the calls."""
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    """From `log_extra`: name -> N values."""
    seconds: list[float] = field(default_factory=list)
    """[K]; they overlap."""
    warnings: dict[str, str] = field(default_factory=dict)
    """What the user should know, by a key under which it is told once."""


def score(
    rewards: Sequence[NamedReward],
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, list[Any]],
    trainer_state: Any = None,
    stop: StopSign | None = None,
) -> RewardTable:
    """Scores N completions with every reward function; an empty batch calls none.

    Functions are called with keyword arguments only, and with those that their signature accepts, all at the
    same time. Which of them ends first changes nothing of what is returned.

    Args:
        prompts, completions: as in the dataset: strings, or lists of role/content messages.
        completion_ids: token ids of each completion.
        columns: the other dataset columns, repeated to N values each.
        stop: what another thread may give to stop the calls; what is returned after that means nothing.

    Raises:
        RunFailed: a function lacks a column; or one with the policy ``fail`` raised (`__cause__` is its
            exception), took longer than its timeout, or returned anything but N finite numbers or None. No
            score is ever made up.
        Stopped: `stop` was given before all functions were called.
    """
    count = len(completions)
    if count == 0:
        return RewardTable([[] for _ in rewards], [[] for _ in rewards], seconds=[0.0] * len(rewards))
    problems = column_problems(rewards, list(columns))
    if problems:
        raise RunFailed("\n".join(map(str, problems)))
    arguments = {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "trainer_state": trainer_state,
    }
    outcomes = call_together(rewards, arguments, count, stop)
    _end_on_failure(rewards, outcomes)
    by_label = {reward.label: outcome for reward, outcome in zip(rewards, outcomes, strict=True)}
    logs = {label: outcome.log for label, outcome in by_label.items()}
    return RewardTable(
        values=[outcome.values for outcome in outcomes],
        failed=[outcome.failed for outcome in outcomes],
        metrics=logged_metrics(logs),
        extra_columns=extra_columns(logs),
        seconds=[outcome.seconds for outcome in outcomes],
        warnings=_warnings(rewards, outcomes),
    )


def _end_on_failure(rewards: Sequence[NamedReward], outcomes: Sequence[Outcome]) -> None:
    fatal = [
        (f"reward '{reward.label}' {outcome.failure}", outcome.error)
        for reward, outcome in zip(rewards, outcomes, strict=True)
        if outcome.failure and reward.on_error == "fail"
    ]
    if fatal:
        cause = next((error for _, error in fatal if error is not None), None)
        raise RunFailed("\n".join(message for message, _ in fatal)) from cause


def _warnings(rewards: Sequence[NamedReward], outcomes: Sequence[Outcome]) -> dict[str, str]:
    told = {}
    for reward, outcome in zip(rewards, outcomes, strict=True):
        if outcome.failure:
            told[f"failure of {reward.label}"] = (
                f"reward '{reward.label}' {outcome.failure}\n    it abstains for those completions; "
                f"further failures are only counted (rewards/{reward.label}/errors)"
            )
        if reward.in_main_thread:
            told[f"thread of {reward.label}"] = (
                f"reward '{reward.label}' sets a signal handler, which Python allows in the main thread only: "
                "it is called there, where its timeout cannot be kept"
            )
    return told


def column_problems(
    rewards: Sequence[NamedReward],
    columns: Sequence[str],
    key: str = "rewards",
    data: str = "the data",
) -> list[Problem]:
    """A problem for each column that a reward function cannot do without and the data lacks.

    Args:
        key: under which the run file lists them.
        data: what messages call the data.
    """
    return [
        Problem(
            f"reward '{reward.label}' needs column '{name}', which {data} lacks",
            key=key,
            allowed=", ".join(columns) or "none beside the prompt",
            nearest=nearest(name, columns),
        )
        for reward in rewards
        for name in reward.missing_columns(columns)
    ]
