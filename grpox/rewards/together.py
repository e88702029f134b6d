"""Calls all reward functions of a run at once and waits for them in their order."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from grpox.rewards.call import RewardCall
from grpox.rewards.named import NamedReward
from grpox.rewards.outcome import Outcome, outcome_of, whole_call_failed


def call_together(rewards: Sequence[NamedReward], arguments: Mapping[str, Any], count: int) -> list[Outcome]:
    """One outcome per reward, in order, whichever ends first.

    Each function runs in a thread of its own; what is awaitable runs in one event loop that all share. A
    function that sets a signal handler is called again in this thread, if it is the main one, and from then
    on always: handlers can be set in no other. Its timeout cannot be kept there.

    Args:
        arguments: what the functions may take, besides `log_metric` and `log_extra`.
        count: completions, at least one.
    """
    calls: dict[int, RewardCall] = {}
    try:
        for place, reward in enumerate(rewards):
            if not _hangs(reward):
                calls[place] = RewardCall(reward.function, arguments, count)
                if not reward.in_main_thread:
                    calls[place].start()
        for place, call in calls.items():
            if rewards[place].in_main_thread:
                call.run()
        for place, call in calls.items():
            if not rewards[place].in_main_thread:
                calls[place] = _finished(rewards[place], call, arguments, count)
    except BaseException:  # an interrupt: what was started is stopped as far as it can be
        for call in calls.values():
            call.abandon()
        raise
    return [
        outcome_of(calls[place], count) if place in calls else _still_hangs(reward, count)
        for place, reward in enumerate(rewards)
    ]


def _hangs(reward: NamedReward) -> bool:
    if reward.hanging is not None and not reward.hanging.running:
        reward.hanging = None
    return reward.hanging is not None


def _finished(reward: NamedReward, call: RewardCall, arguments: Mapping[str, Any], count: int) -> RewardCall:
    """The call once it has ended or run out of time, made again where it must be in the main thread."""
    if not call.wait(reward.timeout):
        reward.hanging = call
    elif call.needs_main_thread() and threading.current_thread() is threading.main_thread():
        reward.in_main_thread = True
        call = RewardCall(reward.function, arguments, count)
        call.run()
    return call


def _still_hangs(reward: NamedReward, count: int) -> Outcome:
    what = f"still hangs in an earlier call, which took longer than its timeout of {reward.timeout:g} s"
    return whole_call_failed(what, count)
