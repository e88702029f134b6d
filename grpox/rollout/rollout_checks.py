"""Checks of a rollout's own facts as it comes from the generator: mask, turns, finish reason, further facts."""

from __future__ import annotations

import math
from typing import Any

from grpox.contracts import Rollout
from grpox.errors import RunFailed, shorten

_PLAIN = (str, int, float, bool, type(None))


def check_content(rollout: Rollout, generator: str) -> None:
    """Refuse a rollout whose fields contradict each other.

    Args:
        generator: its name in messages.

    Raises:
        RunFailed: finish reason, log-probabilities, mask, turns or extra are not as `grpox.contracts.Rollout`
            has them.
    """
    if problem := rollout_problem(rollout):
        where = f"group {rollout.group_id}, sample {rollout.sample}"
        raise RunFailed(f"generator '{generator}' returned a rollout ({where}) whose {problem}")


def rollout_problem(rollout: Rollout) -> str:
    """Describe the first field of a rollout that does not fit the others; empty if all do."""
    count, mask = len(rollout.completion_ids), rollout.model_mask
    if not _is_reason(rollout.finish_reason):
        return f"finish_reason is {rollout.finish_reason!r} and no text"
    for name in ("model_mask", "sampler_logprobs"):
        values = getattr(rollout, name)
        if values is not None and len(values) != count:
            return f"{name} has {len(values)} values for {count} completion tokens"
    if mask is not None and count and not any(mask):
        return "model_mask is False for every token: the model wrote none"
    return (_turns_problem(rollout) if rollout.turns else "") or (
        _extra_problem(rollout.extra, "extra") if rollout.extra else ""
    )


def _is_reason(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason)


def _turns_problem(rollout: Rollout) -> str:
    count, end = len(rollout.completion_ids), 0
    written = [False] * count
    for place, turn in enumerate(rollout.turns):
        if not end <= turn.start < turn.end <= count:
            return f"turn {place} is tokens {turn.start} to {turn.end}, after token {end} and of {count}"
        if not _is_reason(turn.finish_reason):
            return f"turn {place} has the finish_reason {turn.finish_reason!r} and no text"
        if turn.reward is not None and not math.isfinite(turn.reward):
            return f"turn {place} has the reward {turn.reward}; it is finite, or None"
        end = turn.end
        written[turn.start : end] = [True] * (end - turn.start)
    mask = [True] * count if rollout.model_mask is None else [bool(each) for each in rollout.model_mask]
    if written == mask:
        return ""
    place = next(place for place in range(count) if written[place] != mask[place])
    where = "in a turn" if written[place] else "in no turn"
    return f"model_mask is {mask[place]} at token {place}, which is {where}"


def _extra_problem(value: Any, name: str) -> str:
    """Find the first value that is not plain: checkpoints and the record hold plain values alone."""
    if type(value) in _PLAIN:
        return ""
    if type(value) in (list, tuple):
        return next(filter(None, (_extra_problem(each, name) for each in value)), "")
    if type(value) is dict and all(type(key) is str for key in value):
        return next(filter(None, (_extra_problem(each, f"{name}.{key}") for key, each in value.items())), "")
    given = f"{shorten(repr(value), 60)} ({type(value).__name__})"
    return f"{name} is {given}: it holds texts, numbers, None, and lists and dicts by text of these"
