"""The reward functions of a run, with label and weight, called all at once and waited for in their order."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from grpox.data.reward_signature import Signature, nested_columns
from grpox.errors import chain, text_of
from grpox.rollout.rewards.call import (
    BackgroundCall,
    CallFailed,
    CallLog,
    CheckedScores,
    accepted,
    awaited,
    called,
    current_device,
    hanging_at,
    placed,
    use_device,
)
from grpox.rollout.rewards.lists import ListShape, lengths_of
from grpox.rollout.rewards.process import ProcessFailed, RewardProcess
from grpox.runtime.foreign_code import copied
from grpox.runtime.signals import raise_if_signal

CANCEL_SECONDS = 1.0
"""Seconds to wait for a cancelled coroutine; one that continues after that counts as hanging."""


class RewardCall:
    """A call of a function, here or in its process, for `count` completions, in a daemon thread of its own.

    Python cannot kill a thread. A daemon thread that hangs holds up neither the run, which stops waiting for
    it, nor the end of the process. A process is killed by its own limits.

    Once the call has ended, either `scores` is set, or `failure` says what went wrong, and `error` is the
    exception where the function raised.

    Args:
        lengths, signature: see `grpox.rollout.rewards.call.called`.
    """

    def __init__(
        self,
        function: Callable[..., Any] | RewardProcess,
        arguments: Mapping[str, Any],
        count: int,
        lengths: Sequence[int] | None = None,
        signature: Signature | None = None,
    ) -> None:
        self.log = CallLog()
        self.scores: CheckedScores | None = None
        self.failure = ""
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._function, self._count = function, count
        self._work = (
            partial(function.ask, arguments, count, lengths)
            if isinstance(function, RewardProcess)
            else partial(called, function, arguments, count, lengths, self._settle, signature)
        )
        self._lock = threading.Lock()
        self._is_begun = False
        self._ended = threading.Event()
        self._abandoned = False
        self._awaited: BackgroundCall | None = None
        self._device = current_device()
        inside = contextvars.copy_context().run
        self._thread = threading.Thread(target=inside, args=(self.run,), name="grpox-reward", daemon=True)
        self._started = time.perf_counter()

    @property
    def values(self) -> list[float | None]:
        """[N]; None where the function abstained or failed."""
        return [None] * self._count if self.failure or self.scores is None else self.scores.values

    @property
    def failed(self) -> Collection[int]:
        """The completions, from 0 to N - 1, for which it failed."""
        return range(self._count) if self.failure or self.scores is None else self.scores.refused

    @property
    def problem(self) -> str:
        """The first thing that went wrong; empty where nothing did."""
        if self.failure or self.scores is None:
            return self.failure or "ended without scores"
        return next(iter(self.scores.refused.values()), "")

    @property
    def running(self) -> bool:
        """True from the call until the function has returned."""
        return self._is_begun and not self._ended.is_set()

    def start(self) -> None:
        """Start the call in its thread."""
        self._is_begun = True
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait until `timeout` seconds after the start; abandon a call that has not ended, and return False."""
        if isinstance(self._function, RewardProcess):  # which has the limit itself
            return self._ended.wait()
        # Not join: where an interrupt ends it, Python 3.11 holds the thread for ended.
        if self._ended.wait(max(0.0, self._started + timeout - time.perf_counter())):
            return True
        self.seconds = time.perf_counter() - self._started
        at = hanging_at(None if self._awaited else self._thread.ident, self._function)
        self.failure = f"took longer than its timeout of {timeout:g} s{placed(at)}"
        self.abandon()
        return False

    def abandon(self) -> None:
        """Stop what can be stopped: a process, a coroutine; a thread stays until its function returns."""
        if isinstance(self._function, RewardProcess):
            if self.running:
                self._function.stop()
            return
        with self._lock:
            self._abandoned = True
        if self._awaited is not None and self.running:
            self._awaited.cancel()
            self._ended.wait(CANCEL_SECONDS)

    def run(self) -> None:
        """Call the function in the current thread, wait for it and check what it returned."""
        try:
            use_device(self._device)
            scores, log = self._work()
            if not self._abandoned:
                self.scores, self.log = scores, log
        except CallFailed as error:
            self._fail(str(error), None if isinstance(error, ProcessFailed) else error.__cause__)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            raise_if_signal(error)
            self._fail(f"could not be called: {text_of(error)}", error)
        finally:
            del self._work  # the copies of its arguments, while this is a reward's latest call
            self.seconds = self.seconds or time.perf_counter() - self._started
            self._ended.set()

    def needs_main_thread(self) -> bool:
        """Tell whether a plain function failed by setting a signal handler, as math-verify's limit does."""
        if self.error is None or self._awaited is not None:
            return False
        return any("signal only works in main thread" in text_of(error) for error in chain(self.error))

    def _settle(self, returned: Awaitable[Any]) -> Any:
        try:
            with self._lock:
                if self._abandoned:
                    raise asyncio.CancelledError
                self._awaited = BackgroundCall(awaited(returned, self._device))
            return self._awaited.result()
        except asyncio.CancelledError:
            if inspect.iscoroutine(returned):  # it never began: else the cancellation was raised in it
                returned.close()
            raise

    def _fail(self, failure: str, error: BaseException | None) -> None:
        if not self._abandoned:  # else it failed by its timeout, whatever it does later
            self.failure, self.error = failure, error


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
    latest: RewardCall | None = field(default=None, repr=False)
    """The last call; while it goes on beyond its time, the function is not called again."""
    needs_main_thread: bool = False
    """True if the function was seen to set a signal handler, which Python allows in the main thread only."""

    @cached_property
    def signature(self) -> Signature:
        """The signature of the function, which is read once."""
        if isinstance(self.function, RewardProcess):
            return self.function.ready.signature
        return Signature.of(self.function)

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
        self, arguments: Mapping[str, Any], count: int, facts: Mapping[str, Any] | None = None
    ) -> RewardCall:
        """Return a call that has not started yet, or a failed one while an earlier call still hangs.

        Args:
            facts: further arguments; the function gets the facts that it names, unless a column has the name.
                Default: each completion is one turn.
        """
        if self.latest is not None and self.latest.running:
            refused = RewardCall(self.function, {}, count)
            still = "still hangs in an earlier call, which took longer than its timeout of"
            refused.failure = f"{still} {self.timeout:g} s"
            return refused
        shape, known, signature = self.lists, facts or {}, self.signature
        lengths = None if shape is None else lengths_of(shape, arguments, known.get("turns"))
        if signature.facts:
            wanted = {name: known[name] for name in signature.facts if name in known and name not in arguments}
            arguments = {**arguments, **wanted}
        if nested := [name for name in signature.needs if "." in name]:
            arguments = {**arguments, **nested_columns(nested, arguments)}
        if not isinstance(self.function, RewardProcess):
            # What one function does to its lists and rows must not reach the others, nor the record.
            arguments = {
                name: value if name == "trainer_state" else copied(value)
                for name, value in accepted(signature, arguments).items()
            }
        self.latest = RewardCall(self.function, arguments, count, lengths, signature)
        return self.latest

    def abandon(self) -> None:
        """Abandon the call that goes on, if there is one."""
        if self.latest is not None and self.latest.running:
            self.latest.abandon()

    @property
    def in_main_thread(self) -> bool:
        """True if it has to be called in the main thread, and this is the main thread."""
        return self.needs_main_thread and threading.current_thread() is threading.main_thread()


def call_together(
    rewards: Sequence[NamedReward],
    arguments: Mapping[str, Any],
    count: int,
    facts: Mapping[str, Any] | None = None,
) -> list[RewardCall]:
    """Call all functions at once; return one ended or abandoned call per reward, in their order.

    Each function runs in its process, or in a thread of its own, where what is awaitable shares one event
    loop. A function in a thread that sets a signal handler is called again in this thread, if it is the main
    one, and from then on always: handlers can be set in no other. Its timeout cannot be kept there.

    Args:
        arguments: arguments that functions may take, besides `log_metric` and `log_extra`.
        count: completions, at least one.
        facts: see `NamedReward.call`.
    """
    calls: list[RewardCall] = []
    apart: list[tuple[int, NamedReward]] = []
    here: list[RewardCall] = []
    try:
        for place, reward in enumerate(rewards):
            calls.append(reward.call(arguments, count, facts))
            if calls[place].failure:
                continue
            if reward.in_main_thread:
                here.append(calls[place])
            else:
                calls[place].start()
                apart.append((place, reward))
        for call in here:
            call.run()
        for place, reward in apart:
            if calls[place].wait(reward.timeout) and calls[place].needs_main_thread():
                reward.needs_main_thread = True
                if reward.in_main_thread:
                    calls[place] = reward.call(arguments, count, facts)
                    calls[place].run()
    except BaseException:  # an interrupt: what was started is stopped as far as it can be
        for call in calls:
            call.abandon()
        raise
    return calls
