"""Checks of a rollout's own facts as it comes from the generator: mask, turns, finish reason, further facts."""

from __future__ import annotations

import math
from typing import Any

from grpox.contracts import Rollout, Turn
from grpox.errors import RunFailed, shorten

_PLAIN = (str, int, float, bool, type(None))


def check_content(rollout: Rollout, generator: str) -> None:
    """Refuse a rollout whose facts contradict each other.

    Args:
        generator: its name in messages.

    Raises:
        RunFailed: finish reason, log-probabilities, mask, turns or extra are not as `grpox.contracts.Rollout`
            has them.
    """
    problem = _problem(rollout)
    if problem:
        where = f"sample {rollout.sample} of group {rollout.group_id}"
        raise RunFailed(f"generator '{generator}' returned for {where} {problem}")


def _problem(rollout: Rollout) -> str:
    length, mask, logprobs = len(rollout.completion_ids), rollout.model_mask, rollout.sampler_logprobs
    if not _is_reason(rollout.finish_reason):
        return f"the finish_reason {rollout.finish_reason!r}; it is a text"
    if logprobs is not None and len(logprobs) != length:
        return f"{len(logprobs)} sampler_logprobs for {length} tokens"
    if mask is not None and len(mask) != length:
        return f"a model_mask of {len(mask)} values for {length} tokens"
    if mask is not None and length and not any(mask):
        return "a model_mask without a token that the model wrote"
    return (_turns_problem(rollout) if rollout.turns else "") or (
        _extra_problem(rollout.extra, "extra") if rollout.extra else ""
    )


def _is_reason(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason)


def _turns_problem(rollout: Rollout) -> str:
    length, end = len(rollout.completion_ids), 0
    written = [False] * length
    for number, turn in enumerate(rollout.turns):
        problem = _turn_problem(turn, end, length)
        if problem:
            return f"turn {number} (from 0), {problem}"
        end = turn.end
        written[turn.start : end] = [True] * (end - turn.start)
    mask = [True] * length if rollout.model_mask is None else [bool(each) for each in rollout.model_mask]
    if written != mask:
        place = next(place for place in range(length) if written[place] != mask[place])
        where = "in a turn" if written[place] else "in no turn"
        return f"a model_mask that is {mask[place]} at token {place}, which is {where}"
    return ""


def _turn_problem(turn: Turn, after: int, length: int) -> str:
    place = f"tokens {turn.start} to {turn.end}"
    if not 0 <= turn.start < turn.end <= length:
        return f"{place}, of a completion of {length} tokens"
    if turn.start < after:
        return f"{place}, which begins before the end of the turn before it, {after}"
    if not _is_reason(turn.finish_reason):
        return f"with the finish_reason {turn.finish_reason!r}; it is a text"
    if turn.reward is not None and not math.isfinite(turn.reward):
        return f"with the reward {turn.reward}; it is finite, or None"
    return ""


def _extra_problem(value: Any, name: str) -> str:
    """Find what is no plain value: checkpoints and the record hold plain values alone."""
    if type(value) in _PLAIN:
        return ""
    if type(value) in (list, tuple):
        return next(filter(None, (_extra_problem(each, name) for each in value)), "")
    if type(value) is dict and all(type(key) is str for key in value):
        return next(filter(None, (_extra_problem(each, f"{name}.{key}") for key, each in value.items())), "")
    given = f"{shorten(repr(value), 60)} ({type(value).__name__})"
    return f"{name} = {given}; extra holds texts, numbers, None, and lists and dicts by text of these"
