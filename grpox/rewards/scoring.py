"""Calls the reward functions of a run: rewards[K][N] of a batch, or a failure that names the function."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpox.contracts import Text
from grpox.errors import Problem, RunFailed, nearest
from grpox.rewards.arguments import accepted, missing_columns
from grpox.rewards.background_loop import run_in_background_loop
from grpox.rewards.scores import BadScores, checked_scores


@dataclass(frozen=True)
class NamedReward:
    """A reward function with its label in messages and metrics, and its weight in the sum."""

    label: str
    function: Callable[..., Any]
    weight: float = 1.0


@dataclass(frozen=True)
class RewardTable:
    """The scores of `N` completions by `K` reward functions, and what the functions logged."""

    values: list[list[float | None]]
    """[K][N]; None where the function abstained."""
    metrics: dict[str, float]
    """From `log_metric`, averaged over the calls of one name."""
    extra_columns: dict[str, list[Any]]
    """From `log_extra`: name -> N values."""
    seconds: list[float]
    """[K]; those of async functions overlap."""


@dataclass
class _Log:
    """What the functions log: ``log_metric(name, value)`` and ``log_extra(column, values)``."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns.setdefault(column, []).extend(values)


def score(
    rewards: Sequence[NamedReward],
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, list[Any]],
    trainer_state: Any = None,
) -> RewardTable:
    """Scores N completions with every reward function; an empty batch calls none.

    Functions are called with keyword arguments only, and with those that their signature accepts. Plain ones
    run in order in the calling thread (where signal handlers work); awaitables run together afterwards.

    Args:
        prompts, completions: as in the dataset: strings, or lists of role/content messages.
        completion_ids: token ids of each completion.
        columns: the other dataset columns, repeated to N values each.

    Raises:
        RunFailed: a function raised (`__cause__` is its exception), lacks a column, or returned anything but
            N finite numbers or None. No score is ever made up.
    """
    count = len(completions)
    if count == 0:
        return RewardTable([[] for _ in rewards], {}, {}, [0.0] * len(rewards))
    problems = column_problems(rewards, list(columns))
    if problems:
        raise RunFailed("\n".join(map(str, problems)))
    log = _Log()
    arguments = {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "trainer_state": trainer_state,
        "log_metric": log.metric,
        "log_extra": log.extra,
    }
    returned, seconds = _call_all(rewards, arguments)
    values = [_checked(reward, result, count) for reward, result in zip(rewards, returned, strict=True)]
    _check_columns(log.columns, count)
    metrics = {name: sum(logged) / len(logged) for name, logged in log.metrics.items()}
    return RewardTable(values, metrics, log.columns, seconds)


def column_problems(rewards: Sequence[NamedReward], columns: Sequence[str]) -> list[Problem]:
    """A problem for each column that a reward function cannot do without and the data lacks."""
    return [
        Problem(
            f"reward '{reward.label}' needs column '{name}', which the data lacks",
            key="rewards",
            allowed=", ".join(columns) or "none beside the prompt",
            nearest=nearest(name, columns),
        )
        for reward in rewards
        for name in missing_columns(reward.function, columns)
    ]


def completion_text(completion: Text) -> str:
    """The text of a completion: the string itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, str) or content is None:  # a message that only calls a tool has no content
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _call_all(rewards: Sequence[NamedReward], arguments: Mapping[str, Any]) -> tuple[list[Any], list[float]]:
    """What each function returned, awaited, and the seconds it took."""
    returned: list[Any] = []
    seconds: list[float] = []
    try:
        for reward in rewards:
            start = time.perf_counter()
            try:
                returned.append(reward.function(**accepted(reward.function, arguments)))
            except Exception as error:
                raise _raised(reward, error) from error
            seconds.append(time.perf_counter() - start)
        pending = [k for k, result in enumerate(returned) if inspect.isawaitable(result)]
        if pending:
            awaited = run_in_background_loop(_await_all([(rewards[k], returned[k]) for k in pending]))
            for k, (result, took) in zip(pending, awaited, strict=True):
                returned[k], seconds[k] = result, seconds[k] + took
    finally:
        for result in returned:
            if inspect.iscoroutine(result):  # never awaited, because a function before or after it raised
                result.close()
    return returned, seconds


async def _await_all(pending: Sequence[tuple[NamedReward, Awaitable[Any]]]) -> list[tuple[Any, float]]:
    async def one(reward: NamedReward, result: Awaitable[Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        try:
            value = await result
        except Exception as error:
            raise _raised(reward, error) from error
        return value, time.perf_counter() - start

    tasks = [asyncio.ensure_future(one(reward, result)) for reward, result in pending]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # gather leaves the others running when one fails
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _checked(reward: NamedReward, returned: Any, count: int) -> list[float | None]:
    try:
        return checked_scores(returned, count)
    except BadScores as error:
        raise RunFailed(f"reward '{reward.label}' {error}") from error
    except Exception as error:  # a generator raises only as it is read
        raise _raised(reward, error) from error


def _check_columns(columns: Mapping[str, list[Any]], count: int) -> None:
    for name, values in columns.items():
        if len(values) != count:
            raise RunFailed(
                f"rewards logged {len(values)} values of log_extra column '{name}' for {count} completions; "
                "one value per completion, and a name of its own for each function"
            )


def _raised(reward: NamedReward, error: Exception) -> RunFailed:
    # The first frame is the call in this module; the second is the user's own function.
    frames = traceback.extract_tb(error.__traceback__)[1:2]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    return RunFailed(f"reward '{reward.label}' raised {type(error).__name__}: {error}{where}")
