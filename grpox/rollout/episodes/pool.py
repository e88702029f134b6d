"""Environments of a rank, each in a process of its own, as the trainer sees them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from grpox.config import EpisodesConfig
from grpox.errors import ConfigError, Problem, RunFailed, describe
from grpox.rollout.episodes.episode_process import LAST, Request
from grpox.rollout.episodes.forker import LINK, LOST, SHUT, UNASKED, Setup
from grpox.rollout.episodes.messages import Action, Blueprint, Lost, Observation, Outcome, Start
from grpox.runtime.child import Child, ChildEnded, ChildFailed, ChildLate, Restarted
from grpox.runtime.child_output import ChildOutput
from grpox.runtime.logs import get_logger

logger = get_logger(__name__)
GRACE_SECONDS = 5.0
"""Seconds after the time limit in which a call can be interrupted; then its process is killed."""
LOAD_SECONDS = 600.0
"""Time limit of importing the environments."""
STALL_SECONDS = 60.0
"""Seconds that the forker may pause within a message."""
STOP_SECONDS = 10.0
"""Seconds that the forker may be stopped, as an environment can do by a signal."""
CLOSE_SECONDS = 30.0
"""Seconds beyond a call's time limit in which all open environments are closed at the end."""
ANSWERS = {
    (module, name)
    for module, names in {
        "grpox.contracts": ("ToolCall", "ToolResult"),
        "grpox.errors": ("Problem",),
        "grpox.environments.environment": ("Appended",),
        "grpox.rollout.episodes.messages": ("Observation", "Outcome"),
    }.items()
    for name in names
}
"""Classes in answers. No other is loaded, so that nothing which an environment sends runs in the trainer."""


@dataclass
class Counters:
    """Numbers of environments since the beginning; those that are open make up the difference."""

    opened: int = 0
    closed: int = 0
    lost: int = 0
    """Environments whose processes ended before they were closed."""


class _Ledger:
    """Open environments, each with the forker of its process, and the numbers of those that have ended."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._lock = threading.Lock()
        self._open: dict[int, _Forker] = {}
        self._reasons: dict[int, str] = {}
        """Reasons why environments were lost between two requests."""

    def open(self, keys: Iterable[int], forker: _Forker) -> None:
        """Note environments that begin."""
        with self._lock:
            for key in keys:
                if key in self._open:
                    raise ValueError(f"the environment {key} is open")
                self._open[key] = forker
                self._reasons.pop(key, None)
                self.counters.opened += 1

    def forker_of(self, key: int) -> _Forker | None:
        """Return the forker of an open environment."""
        with self._lock:
            return self._open.get(key)

    def note_closed(self, key: int) -> None:
        """Note that an environment was closed."""
        with self._lock:
            if self._open.pop(key, None) is not None:
                self.counters.closed += 1

    def note_lost(self, key: int, reason: str) -> None:
        """Note that the process of an environment has ended, and why."""
        with self._lock:
            if self._open.pop(key, None) is not None:
                self.counters.lost += 1
                self._reasons[key] = reason

    def note_all_lost(self, forker: _Forker, reason: str) -> None:
        """Note that all processes of a forker have ended."""
        with self._lock:
            keys = [key for key, its in self._open.items() if its is forker]
        for key in keys:
            self.note_lost(key, reason)

    def lost(self, key: int) -> Lost:
        """Return the reason why an environment is not open, the first time it is asked for."""
        with self._lock:
            return Lost(self._reasons.pop(key, "is not open"))


class ProcessEnvironments:
    """`grpox.rollout.episodes.messages.Environments` in processes of their own.

    One small process imports the environments, without torch, and forks one for each episode. It is started
    again by the next `start` if it has ended.

    Args:
        environments: classes that another process can import.
        tools: functions that another process can import.
        config: limits.
        grace: seconds beyond the time limit, see `GRACE_SECONDS`.

    Raises:
        ConfigError: they cannot be loaded, or are no environments and tools.
    """

    def __init__(
        self,
        environments: Sequence[Blueprint],
        tools: Sequence[Blueprint],
        config: EpisodesConfig,
        grace: float = GRACE_SECONDS,
    ) -> None:
        setup = partial(
            Setup,
            tuple(environments),
            tuple(tools),
            tuple(sys.path),
            config.max_calls,
            config.tool_timeout,
            grace,
            config.memory,
            config.concurrency,
        )
        self._close_seconds = config.tool_timeout + grace + CLOSE_SECONDS
        self._starting = threading.Lock()
        ledger = self._ledger = _Ledger()
        self._forker = Restarted(lambda: _Forker(setup, ledger))
        self._forker.get()

    @property
    def counters(self) -> Counters:
        """Numbers of environments that were opened, closed and lost."""
        return self._ledger.counters

    def start(self, starts: Mapping[int, Start]) -> dict[int, Observation | Lost]:
        """Build and reset environments.

        Raises:
            RunFailed: a row of the data cannot be sent to another process.
            ConfigError: the process of the environments had to be started again, and could not load them.
        """
        payloads = {key: _pickled(start) for key, start in starts.items()}
        with self._starting:
            forker = self._forker.get()
            if forker.failure:
                logger.warning("the process of the environments is started again: it %s", forker.failure)
                self._forker.stop()
                forker = self._forker.get()
            self._ledger.open(starts, forker)
        return self._ask(Request.START, payloads)

    def step(self, actions: Mapping[int, Action]) -> dict[int, Observation | Lost]:
        """Give each environment a turn of its model."""
        return self._ask(Request.STEP, {key: pickle.dumps(action) for key, action in actions.items()})

    def finish(self, keys: Sequence[int]) -> dict[int, Outcome | Lost]:
        """Ask for the outcomes of ended episodes, and close their environments."""
        return self._ask(Request.FINISH, dict.fromkeys(keys, b""))

    def abandon(self, keys: Sequence[int]) -> None:
        """Close environments whose episodes nobody wants any more; those that are lost are left out."""
        self._ask(Request.CLOSE, dict.fromkeys(keys, b""))

    def close(self) -> None:
        """Close all environments and end their processes."""
        if (forker := self._forker.current) is not None:
            forker.shut(self._close_seconds)
        self._forker.close()

    def _ask(self, kind: Request, payloads: Mapping[int, bytes]) -> dict[int, Any]:
        """Send requests, and return the answers to all."""
        sent = {}
        for key, payload in payloads.items():
            if (forker := self._ledger.forker_of(key)) is not None:
                sent[key] = forker, forker.send(key, kind, payload)
        answers: dict[int, Any] = {}
        for key in payloads:
            forker, number = sent.get(key, (None, UNASKED))
            answer = forker.wait(number) if forker is not None else None
            answers[key] = self._ledger.lost(key) if answer is None else answer
        for forker in {forker for forker, _ in sent.values()}:
            forker.output.end_call()
        return answers


def _pickled(start: Start) -> bytes:
    try:
        return pickle.dumps(start)
    except Exception as error:
        what = "a row of the data cannot be sent to the process of an environment"
        raise RunFailed(f"{what}: {describe(error)}; episodes.isolation: none sends nothing") from error


@dataclass
class _Sent:
    """A request, and its answer once that is there."""

    kind: Request
    answer: Any = None
    """None if the environment is lost."""
    is_answered: bool = False


class _Forker:
    """The process that forks, and the thread that reads its answers."""

    def __init__(self, setup: Callable[[str], Setup], ledger: _Ledger) -> None:
        self.failure = ""
        """Reason why it ended; empty while it runs."""
        self._ledger = ledger
        self._last = UNASKED
        self._sent: dict[int, _Sent] = {}
        """Requests by number."""
        self._runs_at = time.monotonic()
        """Time at which the process was last seen not to be stopped."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self.output = ChildOutput("the environments")
        self._folder = tempfile.TemporaryDirectory(prefix="grpox-episodes-", ignore_cleanup_errors=True)
        # Sets of texts have an order of their own in each process, unless their hashes have a seed.
        variables = {"PYTHONHASHSEED": "0", **os.environ}
        command = ["-P", "-m", "grpox.rollout.episodes.forker"]
        try:
            streams = (self.output.stdout, self.output.stderr)
            self._child = Child(command, STALL_SECONDS, output=streams, environment=variables)
        finally:
            self.output.start()
        try:
            self._child.send(pickle.dumps(setup(self._folder.name)))
            answer = self._child.receive(time.monotonic() + LOAD_SECONDS)
            problems: tuple[Problem, ...] = _Answers(io.BytesIO(answer)).load()
        except ChildFailed as error:
            self._end()
            what = "the process of the environments ended, or took too long, as it imported them"
            raise ConfigError(what, "environment", allowed="episodes.isolation: none shows why") from error
        except BaseException:
            self._end()
            raise
        if problems:
            self._end()
            raise ConfigError(problems)
        self._reader = threading.Thread(target=self._read, name="grpox-environments", daemon=True)
        self._reader.start()

    def send(self, key: int, kind: Request, payload: bytes) -> int:
        """Send a request and return its number."""
        with self._changed:
            self._last += 1
            number = self._last
            self._sent[number] = _Sent(kind)
        try:
            with self._sending:
                self._child.send(LINK.pack(key, number, kind) + payload)
        except ChildFailed:
            self._fail("does not read its requests")
        return number

    def wait(self, number: int) -> Any:
        """Wait for the answer to a request: an object of the environment's process, or None if it is lost."""
        with self._changed:
            sent = self._sent[number]
            self._changed.wait_for(lambda: sent.is_answered or self.failure)
            del self._sent[number]
        return sent.answer

    def shut(self, seconds: float) -> None:
        """Close all environments, for at most so many seconds; those that are left are lost."""
        with contextlib.suppress(ChildFailed):
            with self._sending:
                self._child.send(LINK.pack(0, UNASKED, SHUT))
            self._reader.join(seconds)
            self._child.end()

    def kill(self) -> None:
        """End the process; all its environments end with it."""
        self._fail("was ended")
        self._end()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._child.kill()  # closes what the reader still used
        self.output.end_call()

    def _end(self) -> None:
        self._child.kill()
        self._folder.cleanup()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self.failure = self.failure or reason
            self._ledger.note_all_lost(self, f"the process of all environments {self.failure}")
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            with self._child.in_use:
                while True:
                    message = self._child.receive(math.inf, self._look)
                    key, number, kind = LINK.unpack_from(message)
                    self._take(key, number, kind, message[LINK.size :])
        except ChildLate:
            self._fail(f"was stopped for more than {STOP_SECONDS:g} s, by an environment or from outside")
            self._end()
        except ChildEnded:
            self._fail("has ended")
            self._child.end()  # with what the forker can no longer end
        except BaseException as error:  # noqa: BLE001 - whoever waits must not wait for ever
            self._fail(f"answered what cannot be read: {describe(error)}")

    def _look(self) -> None:
        """Raise ChildLate once the process has been stopped for too long."""
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self._child.pid).status() != psutil.STATUS_STOPPED:
                self._runs_at = time.monotonic()
        if time.monotonic() > self._runs_at + STOP_SECONDS:
            raise ChildLate

    def _take(self, key: int, number: int, kind: int, payload: bytes) -> None:
        """Note an answer; without a number it is of an environment that nobody asked."""
        sent = self._sent.get(number) or _Sent(Request.CLOSE)
        answer = None
        if kind == LOST:
            self._ledger.note_lost(key, payload.decode("utf-8", "replace"))
        else:
            answer = _answer(payload)
            if isinstance(answer, str):
                self._ledger.note_lost(key, answer)  # its process ends with the others
                answer = None
            elif sent.kind in LAST:
                self._ledger.note_closed(key)
        with self._changed:
            sent.answer, sent.is_answered = answer, True
            self._changed.notify_all()


def _answer(payload: bytes) -> Observation | Outcome | str:
    """Read an answer; text says why it cannot be read."""
    try:
        answer = _Answers(io.BytesIO(payload)).load()
    except Exception as error:  # noqa: BLE001 - whatever an environment's process sent
        return f"answered what cannot be read: {describe(error)}"
    if isinstance(answer, Observation | Outcome):
        return answer
    return f"answered with a {type(answer).__name__}"


class _Answers(pickle.Unpickler):
    """Reads answers without loading any other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ANSWERS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an answer")
        return super().find_class(module, name)
