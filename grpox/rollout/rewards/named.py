"""The reward functions of a run, with label and weight, called all at once and waited for in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from grpox.data.reward_signature import Signature, nested_columns
from grpox.rollout.rewards.call import ByName, CallLog, RewardCall, own_copies
from grpox.rollout.rewards.lists import ListShape, lengths_of
from grpox.rollout.rewards.process import ProcessCall, RewardProcess


@dataclass
class NamedReward:
    """A reward function with its label in messages and metrics, and its weight in the sum."""

    label: str
    function: Callable[..., Any] | RewardProcess
    weight: float = 1.0
    on_error: Literal["fail", "abstain"] = "fail"
    """Effect of a failure: it ends the run, or makes the function abstain for the completions it concerns."""
    timeout: float = 600.0
    """Seconds that one call may take."""
    hanging: RewardCall | ProcessCall | None = field(default=None, repr=False)
    """The call that did not end in time; while it goes on, the function is not called again."""
    needs_main_thread: bool = False
    """True if the function was seen to set a signal handler, which Python allows in the main thread only."""

    def __post_init__(self) -> None:
        # Read once, not at each call.
        self._signature = None if isinstance(self.function, RewardProcess) else Signature.of(self.function)

    @cached_property
    def lists(self) -> ListShape | None:
        """The lists that the function returns; None if it returns one number per completion.

        Raises:
            ValueError: its attributes `per` and `separator` say neither.
        """
        if isinstance(self.function, RewardProcess):
            return self.function.ready.lists
        return ListShape.of(self.function)

    def call(
        self, arguments: Mapping[str, Any], count: int, by_name: ByName | None = None
    ) -> RewardCall | ProcessCall:
        """A call that has not started yet, in a thread or, where the function has one, in its process.

        Args:
            by_name: facts about episodes, of which the function gets those that it names and that are no
                columns; default: each completion is one turn.
        """
        shape, known = self.lists, by_name or {}
        lengths = None if shape is None else lengths_of(shape, arguments, known.get("turns"))
        wanted = {name: known[name] for name in self.asks if name in known and name not in arguments}
        arguments = {**arguments, **wanted}
        if nested := [name for name in self._needs if "." in name]:
            arguments |= nested_columns(nested, arguments)
        if isinstance(self.function, RewardProcess):
            return ProcessCall(self.function, arguments, count, lengths)
        assert self._signature is not None
        # What one function does to its lists and rows must not reach the others, nor the record.
        copies = own_copies(self._signature, arguments)
        return RewardCall(self.function, copies, count, lengths, self._signature)

    @property
    def asks(self) -> frozenset[str]:
        """Facts about episodes and prompts that the function names."""
        if isinstance(self.function, RewardProcess):
            return self.function.ready.asks
        return frozenset() if self._signature is None else self._signature.facts

    @property
    def _needs(self) -> tuple[str, ...]:
        if isinstance(self.function, RewardProcess):
            return self.function.reads_columns
        return () if self._signature is None else self._signature.needs

    def missing_columns(self, columns: Iterable[str]) -> list[str]:
        """Dataset columns that the function cannot do without and that `columns` lacks, in its own order."""
        return [name for name in self._needs if not {name, name.partition(".")[0]} & {*columns}]

    @property
    def in_main_thread(self) -> bool:
        """True if it has to be called in the main thread, and this is the main thread."""
        return self.needs_main_thread and threading.current_thread() is threading.main_thread()


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
    """The exception that the function raised."""
    log: CallLog = field(default_factory=CallLog)
    """Empty where the whole call failed."""
    seconds: float = 0.0
    lists: list[list[float] | None] | None = None
    """[N], of a function that returns lists; as `CheckedScores.lists`."""


def outcome_of(call: AnyCall, count: int) -> Outcome:
    """Tell what became of a call that has ended or was abandoned."""
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
        lists=call.scores.lists,
    )


def whole_call_failed(
    failure: str, count: int, error: BaseException | None = None, seconds: float = 0.0
) -> Outcome:
    """No score for any of the `count` completions."""
    return Outcome([None] * count, [True] * count, failure, error, seconds=seconds)


class Stopped(Exception):
    """No further call is started: the stop sign was given."""


class StopSign:
    """A stop for all calls that were put under it; one thread starts the calls, another may give the sign."""

    def __init__(self) -> None:
        self.given = False
        self._calls: list[AnyCall] = []

    def cover(self, call: AnyCall) -> None:
        """Put a call that has not started under this sign; raises Stopped where the sign was given."""
        # Listed before the look at `given`, which `give` sets before it looks at the list: one of them sees.
        self._calls = [*(earlier for earlier in self._calls if earlier.running), call]
        if self.given:
            raise Stopped

    def give(self) -> None:
        """Abandon what goes on (see `RewardCall.abandon`) and let nothing more start."""
        self.given = True
        for call in self._calls:
            call.abandon()


def call_together(
    rewards: Sequence[NamedReward],
    arguments: Mapping[str, Any],
    count: int,
    stop: StopSign | None = None,
    by_name: ByName | None = None,
) -> list[Outcome]:
    """One outcome per reward, in order, whichever ends first.

    Each function runs in its process, or in a thread of its own, where what is awaitable shares one event
    loop. A function in a thread that sets a signal handler is called again in this thread, if it is the main
    one, and from then on always: handlers can be set in no other. Its timeout cannot be kept there.

    Args:
        arguments: what the functions may take, besides `log_metric` and `log_extra`.
        count: completions, at least one.
        stop: another thread may give it; outcomes of calls that were going on then mean nothing.
        by_name: facts about episodes; see `NamedReward.call`.

    Raises:
        Stopped: `stop` was given before all calls had started.
    """
    calls: dict[int, AnyCall] = {}
    try:
        for place, reward in enumerate(rewards):
            if not _hangs(reward):
                calls[place] = reward.call(arguments, count, by_name)
                if stop is not None:
                    stop.cover(calls[place])
                if not reward.in_main_thread:
                    calls[place].start()
        for place, call in calls.items():
            if rewards[place].in_main_thread:
                call.run()
        for place, call in calls.items():
            if not rewards[place].in_main_thread:
                calls[place] = _finished(rewards[place], call, arguments, count, by_name)
    except BaseException:  # an interrupt or stop: what was started is stopped as far as it can be
        for call in calls.values():
            call.abandon()
        raise
    still = "still hangs in an earlier call, which took longer than its timeout of"
    return [
        outcome_of(calls[place], count)
        if place in calls
        else whole_call_failed(f"{still} {reward.timeout:g} s", count)
        for place, reward in enumerate(rewards)
    ]


def _hangs(reward: NamedReward) -> bool:
    if reward.hanging is not None and not reward.hanging.running:
        reward.hanging = None
    return reward.hanging is not None


def _finished(
    reward: NamedReward,
    call: AnyCall,
    arguments: Mapping[str, Any],
    count: int,
    by_name: ByName | None,
) -> AnyCall:
    """The call once it has ended or run out of time, made again where it must be in the main thread."""
    if not call.wait(reward.timeout):
        reward.hanging = call
    elif call.needs_main_thread():
        reward.needs_main_thread = True
        if reward.in_main_thread:
            call = reward.call(arguments, count, by_name)
            call.run()
    return call
