"""Calls all reward functions of a run at once and waits for them in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpox.rollout.rewards.named import NamedReward
from grpox.rollout.rewards.outcome import AnyCall, Outcome, outcome_of, whole_call_failed
from grpox.rollout.rewards.stop import StopSign


def call_together(
    rewards: Sequence[NamedReward], arguments: Mapping[str, Any], count: int, stop: StopSign | None = None
) -> list[Outcome]:
    """One outcome per reward, in order, whichever ends first.

    Each function runs in its process, or in a thread of its own, where what is awaitable shares one event
    loop. A function in a thread that sets a signal handler is called again in this thread, if it is the main
    one, and from then on always: handlers can be set in no other. Its timeout cannot be kept there.

    Args:
        arguments: what the functions may take, besides `log_metric` and `log_extra`.
        count: completions, at least one.
        stop: another thread may give it; outcomes of calls that were going on then mean nothing.

    Raises:
        Stopped: `stop` was given before all calls had started.
    """
    calls: dict[int, AnyCall] = {}
    try:
        for place, reward in enumerate(rewards):
            if not _hangs(reward):
                calls[place] = reward.call(arguments, count)
                if stop is not None:
                    stop.cover(calls[place])
                if not reward.in_main_thread:
                    calls[place].start()
        for place, call in calls.items():
            if rewards[place].in_main_thread:
                call.run()
        for place, call in calls.items():
            if not rewards[place].in_main_thread:
                calls[place] = _finished(rewards[place], call, arguments, count)
    except BaseException:  # an interrupt or stop: what was started is stopped as far as it can be
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


def _finished(reward: NamedReward, call: AnyCall, arguments: Mapping[str, Any], count: int) -> AnyCall:
    """The call once it has ended or run out of time, made again where it must be in the main thread."""
    if not call.wait(reward.timeout):
        reward.hanging = call
    elif call.needs_main_thread():
        reward.needs_main_thread = True
        if reward.in_main_thread:
            call = reward.call(arguments, count)
            call.run()
    return call


def _still_hangs(reward: NamedReward, count: int) -> Outcome:
    what = f"still hangs in an earlier call, which took longer than its timeout of {reward.timeout:g} s"
    return whole_call_failed(what, count)
