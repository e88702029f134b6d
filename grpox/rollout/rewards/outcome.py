"""What became of one function's call: its scores, those that failed, and what it logged."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpox.rollout.rewards.call import RewardCall
from grpox.rollout.rewards.log import CallLog
from grpox.rollout.rewards.process_call import ProcessCall

AnyCall = RewardCall | ProcessCall


@dataclass(frozen=True)
class Outcome:
    """The scores that one reward function gave N completions."""

    values: list[float | None]
    """[N]; None where it abstained or failed."""
    failed: list[bool]
    """[N]; whether it failed for that completion."""
    failure: str = ""
    """The first thing that went wrong; empty where nothing did."""
    error: BaseException | None = None
    """What the function raised."""
    log: CallLog = field(default_factory=CallLog)
    """Empty where the whole call failed."""
    seconds: float = 0.0


def outcome_of(call: AnyCall, count: int) -> Outcome:
    """What became of a call that has ended or was abandoned."""
    if call.failure or call.scores is None:
        failure = call.failure or "ended without scores"
        return whole_call_failed(failure, count, call.error, call.seconds)
    refused = call.scores.refused
    return Outcome(
        call.scores.values,
        [place in refused for place in range(count)],
        next(iter(refused.values()), ""),
        log=call.log,
        seconds=call.seconds,
    )


def whole_call_failed(
    failure: str, count: int, error: BaseException | None = None, seconds: float = 0.0
) -> Outcome:
    """No score for any of the `count` completions."""
    return Outcome([None] * count, [True] * count, failure, error, seconds=seconds)
