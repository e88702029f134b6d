"""The process of a reward function, as the trainer sees it: started, called, watched and killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import psutil

from grpox.contracts import StepContext
from grpox.errors import ConfigError, RunFailed, describe, text_of
from grpox.errors.formatting import format_bytes
from grpox.rollout.rewards.call import CallFailed, CallLog, CheckedScores, accepted, dumped_at, placed
from grpox.rollout.rewards.messages import ATTRIBUTES, WHERE, Ready, Reply, RewardRequest, RewardSpec
from grpox.runtime.logs import get_logger
from grpox.runtime.signals import raise_if_signal
from grpox.runtime.workers import (
    MOST_BYTES,
    Child,
    ChildCut,
    ChildEnded,
    ChildFailed,
    ChildLate,
    Restarted,
    end_text,
)

logger = get_logger(__name__)

START_SECONDS = 600.0
"""The function's module may load a model as it is imported."""


class ProcessFailed(CallFailed):
    """Raised if the process did not answer."""


class RemoteError(Exception):
    """An exception of a function in its process.

    Args:
        trace: the traceback there. As a note, line for line, it is shown whole where one long text is cut.
    """

    def __init__(self, trace: str) -> None:
        super().__init__("raised in the process of the reward")
        self.add_note(trace)


class RewardProcess(Restarted["_Running"]):
    """One process, which is started with this object, and again after it has ended.

    Args:
        timeout: seconds that one call may take.
        memory: GiB that the process and its children may hold together.
    """

    def __init__(self, blueprint: RewardSpec, timeout: float, memory: float) -> None:
        self.blueprint = blueprint
        self._ready: Ready | None = None
        self._state: Mapping[str, Any] | None = None
        """State for the process that replaces one that has ended."""
        self._step: StepContext | None = None
        super().__init__(lambda: _Running(blueprint, timeout, memory))
        self.get().is_prepared = True

    @property
    def ready(self) -> Ready:
        """The process's description of the function.

        Raises:
            ConfigError: it could not build the function.
        """
        if self._ready is None:
            try:
                self._ready = self._started().wait_ready()
            except ProcessFailed as error:
                what = f"reward '{self.blueprint.label}' {error}, as the function was built"
                raise ConfigError(what, self.blueprint.key) from error
        if self._ready.problems:
            raise ConfigError(list(self._ready.problems))
        return self._ready

    def ask(
        self, arguments: Mapping[str, Any], count: int, lengths: Sequence[int] | None = None
    ) -> tuple[CheckedScores, CallLog]:
        """Have the function called for `count` completions; arguments as of `call.called`.

        Raises:
            CallFailed: it failed there.
            ProcessFailed: the process ended, took longer than the timeout or more than the memory; it is gone.
        """
        sent = accepted(self.ready.signature, arguments)
        step = getattr(arguments.get("trainer_state"), "global_step", 0)
        # The same for the same completions at the same step, whatever was called before: Python's hash of whole
        # numbers is the same in every process, unlike that of text.
        seed = hash((step, *map(tuple, arguments.get("completion_ids", ())))) & 0xFFFFFFFF
        reply = self._ask(RewardRequest("", sent, count, seed, lengths))
        if reply.failure:
            raise CallFailed(reply.failure) from (RemoteError(reply.trace) if reply.trace else None)
        scores, log = reply.value
        return scores, log

    def call_method(self, name: str, *arguments: Any) -> Any:
        """Call an optional method of the function.

        A process that has to be started again begins with the state that was last read or restored, and with
        the last `begin_step`.

        Raises:
            RunFailed: the method raised, or the process did not answer; it is gone.
        """
        reward = f"reward '{self.blueprint.label}'"
        try:
            reply = self._ask(RewardRequest(name, arguments))
        except ProcessFailed as error:
            raise RunFailed(f"{reward} {error}, in {name}") from error
        if reply.failure:
            raise RunFailed(f"{reward} {reply.failure}") from RemoteError(reply.trace)
        if name == "state_dict":
            self._state = reply.value
        elif name == "load_state_dict":
            self._state = arguments[0]
        elif name == "begin_step":
            self._step = arguments[0]
        return reply.value

    def _ask(self, request: RewardRequest) -> Reply:
        running = self._started()
        try:
            running.wait_ready()
            self._prepare(running)
            return running.ask(request)
        except ProcessFailed:
            self.stop()
            running.kill()  # where another thread has stopped it in the middle of the call
            raise

    def _prepare(self, running: _Running) -> None:
        """Give a process that was started again the last known state and step, once."""
        if running.is_prepared:
            return
        if self._state is not None:
            logger.warning(
                "the process of reward '%s' was started again, with the state after the last step: changes "
                "since then are lost (docs/state-and-steps.md)",
                self.blueprint.label,
            )
        for name, argument in (("load_state_dict", self._state), ("begin_step", self._step)):
            if argument is not None and (failure := running.ask(RewardRequest(name, (argument,))).failure):
                raise ProcessFailed(f"{failure} after its process was started again")
        running.is_prepared = True

    def _started(self) -> _Running:
        try:
            return self.get()
        except ChildEnded as error:
            raise ProcessFailed("is not called any more") from error


class _Running(Child):
    """One process, from its start to its end."""

    def __init__(self, blueprint: RewardSpec, timeout: float, memory: float) -> None:
        self.is_prepared = False
        """True once it has the state and the step of the process before it."""
        self._timeout, self._memory = timeout, memory
        self._ready: Ready | None = None
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        stacks = self._stacks.fileno()
        # The folder of the run may hold a file named as a module: it comes after the trainer's own path.
        command = ["-P", "-m", "grpox.rollout.rewards.worker", str(stacks)]
        super().__init__(command, timeout, output=f"reward '{blueprint.label}'", pass_fds=(stacks,))
        with contextlib.suppress(ChildFailed):  # it has ended: told by `wait_ready`
            self.send(pickle.dumps(blueprint))

    def wait_ready(self) -> Ready:
        """Wait until the process has built the function; return its description."""
        with self.in_use:
            if self._ready is None:
                late = f"its process took longer than {START_SECONDS:g} s to start"
                self._ready = self._answer(time.monotonic() + START_SECONDS, late)
            return self._ready

    def ask(self, request: RewardRequest) -> Reply:
        """Return the answer to a request."""
        with self.in_use:
            os.ftruncate(self._stacks.fileno(), 0)
            os.lseek(self._stacks.fileno(), 0, os.SEEK_SET)
            deadline = time.monotonic() + self._timeout
            try:
                self.send(pickle.dumps(request))
            except ChildFailed as error:
                raise ProcessFailed(self._end_text("cannot be sent its arguments")) from error
            except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
                why = f"which cannot be pickled ({text_of(error)}): say isolation: thread"
                raise ProcessFailed(f"cannot be sent its arguments, {why}") from error
            reply: Reply = self._answer(deadline, f"took longer than its timeout of {self._timeout:g} s")
            return reply

    def _answer(self, deadline: float, too_long: str) -> Any:
        try:
            answer = self.receive(deadline, self._check_memory)
        except ChildLate as error:
            raise ProcessFailed(too_long + self._placed(ask=True)) from error
        except ChildCut as error:
            what = f"sent back more than {format_bytes(MOST_BYTES)}, or stopped in its midst"
            raise ProcessFailed(what) from error
        except ChildEnded as error:
            raise ProcessFailed(self._end_text("closed its connection to the trainer")) from error
        self._end_call()
        try:
            return pickle.loads(answer)
        except BaseException as error:  # a user's objects are made here, which may raise anything
            raise_if_signal(error)
            raise ProcessFailed(f"sent back what the trainer cannot read: {describe(error)}") from error

    def _check_memory(self) -> None:
        limit = int(self._memory * 2**30)
        # What processes share counts in each by `rss`, and in parts by `pss`, which costs more to find out.
        if self._memory_used("rss") > limit and (used := self._memory_used("pss")) > limit:
            limited = f"its limit (memory) is {self._memory:g} GiB"
            raise ProcessFailed(f"held {format_bytes(used)} of memory; {limited}{self._placed(ask=True)}")

    def _memory_used(self, what: str) -> int:
        used = 0
        with contextlib.suppress(psutil.Error):
            whole = psutil.Process(self.pid)
            for process in (whole, *whole.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    info = process.memory_full_info() if what == "pss" else process.memory_info()
                    used += getattr(info, what)
        return used

    def _end_text(self, alive: str) -> str:
        """Describe how the process ended; return `alive`, with its place, if it goes on."""
        code = self.end()
        self._end_call()
        return f"{alive if code is None else end_text(code)}{self._placed(ask=code is None)}"

    def _placed(self, ask: bool) -> str:
        """Return `` (rewards.py:12)``: the current line if `ask`, else the line where it crashed or begins."""
        if ask:
            self.signal(WHERE)
            deadline = time.monotonic() + 1.0
            while not os.fstat(self._stacks.fileno()).st_size and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.02)  # the rest of it
        stacks = os.pread(self._stacks.fileno(), 1 << 20, 0).decode("utf-8", "replace")
        return placed(dumped_at(stacks) or (self._ready.begins if self._ready else ""))


class RemoteComponent:
    """The optional methods and attributes of a function in its process; calls are sent there."""

    def __init__(self, process: RewardProcess) -> None:
        ready = process.ready
        self.stateless = ready.stateless
        if "end_step" in ready.methods:
            self.statistics = ready.statistics
        for name in ready.methods:
            setattr(self, name, partial(process.call_method, name))
        self.attribute_hashes = partial(process.call_method, ATTRIBUTES)
