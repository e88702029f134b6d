"""Environments of a rank, each in a process of its own, as the trainer sees them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from grpox.config import EpisodesConfig
from grpox.errors import ConfigError, Problem, RunFailed, describe
from grpox.errors.formatting import format_bytes
from grpox.rollout.episodes.episode_process import CALL
from grpox.rollout.episodes.forker import END, FORK, KILL, ORDER
from grpox.rollout.episodes.loading import importable
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import (
    LAST,
    Environments,
    EnvironmentSpec,
    EpisodeOutcome,
    Lost,
    Observation,
    Stage,
    Start,
)
from grpox.runtime.logs import get_logger
from grpox.runtime.workers import (
    END_SECONDS,
    Child,
    ChildCut,
    ChildEnded,
    ChildFailed,
    ChildLate,
    Restarted,
)

logger = get_logger(__name__)
GRACE_SECONDS = 5.0
"""Seconds after the time limit in which a call can be interrupted; then its process is killed."""
LOAD_SECONDS = 600.0
"""Time limit of importing the environments."""
STALL_SECONDS = 60.0
"""Seconds that a process may pause within a message, or before it is forked."""
STOP_SECONDS = 30.0
"""Seconds in which the forker answers, unless an environment has stopped it by a signal."""
CLOSE_SECONDS = 30.0
"""Seconds beyond a call's time limit in which all open environments are closed at the end."""
MOST_ANSWER = 64 << 20
"""Largest answer of a process in bytes."""
FILES = 256
"""Open files that the trainer may need beside one for each episode."""
ANSWERS = {
    *(("grpox.contracts", "ToolCall"), ("grpox.contracts", "ToolResult"), ("grpox.errors", "Problem")),
    ("grpox.environments.environment", "Appended"),
    *(("grpox.rollout.episodes.messages", name) for name in ("Observation", "EpisodeOutcome")),
}
"""Classes in answers. No other is loaded, so that nothing which an environment sends runs in the trainer."""


def open_environments(
    environments: Sequence[EnvironmentSpec], tools: Sequence[EnvironmentSpec], config: EpisodesConfig
) -> ProcessEnvironments | LocalEnvironments:
    """Open the environments of a run, in processes or in the trainer; the caller must close them.

    Args:
        environments: the run's classes, in its order; none if it has tools alone.
        tools: the run's functions, which all environments have beside their own tools.
        config: limits, and where environments run.

    Raises:
        ConfigError: an environment or tool cannot be loaded, is invalid, or is an object given in Python that
            needs `isolation: none`.
    """
    if config.isolation == "none":
        return LocalEnvironments(environments, tools, config)
    problems: list[Problem] = []
    checked: dict[str, list[EnvironmentSpec]] = {"environment": [], "tool": []}
    for what, blueprints in (("environment", environments), ("tool", tools)):
        for blueprint in blueprints:
            try:
                checked[what].append(importable(blueprint, what))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return ProcessEnvironments(checked["environment"], checked["tool"], config)


class ProcessEnvironments(Environments):
    """Environments in processes of their own.

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
        environments: Sequence[EnvironmentSpec],
        tools: Sequence[EnvironmentSpec],
        config: EpisodesConfig,
        grace: float = GRACE_SECONDS,
    ) -> None:
        limits = config.max_calls, config.tool_timeout, config.memory
        super().__init__()
        self._limits = config.tool_timeout, grace
        self._forker = Restarted(lambda: _ForkServer(environments, tools, limits))
        self._forker.get()
        self._threads = ThreadPoolExecutor(config.concurrency, "grpox-environments")

    def close(self) -> None:
        """Close all environments and end their processes."""
        closing = [self._threads.submit(self._answer, key, Stage.CLOSE, None) for key in [*self._open]]
        wait(closing, sum(self._limits) + CLOSE_SECONDS)
        self._forker.close()  # those that are left are lost
        self._threads.shutdown()

    def _new(self, starts: Mapping[int, Start]) -> dict[int, _Episode]:
        try:
            starting = {key: pickle.dumps(start) for key, start in starts.items()}
        except Exception as error:
            what = "a row of the data cannot be sent to the process of an environment"
            raise RunFailed(f"{what}: {describe(error)}; episodes.isolation: none sends nothing") from error
        forker = self._forker.get()
        if forker.failure or forker.has_ended():
            reason = forker.failure or "has ended"
            logger.warning("the process of the environments is started again: it %s", reason)
            self._forker.stop()
            forker = self._forker.get()
        _allow_files(len(self._open) + len(starting) + FILES)
        return {key: _Episode(forker, payload, *self._limits) for key, payload in starting.items()}

    def _ask(self, kind: Stage, messages: Mapping[int, Any]) -> dict[int, Any]:
        forkers = {episode.forker for key in messages if (episode := self._open.get(key))}
        answers = {
            key: self._threads.submit(self._answer, key, kind, message)
            for key, message in messages.items()
            if key in self._open
        }
        result = {key: answers[key].result() if key in answers else Lost() for key in messages}
        for forker in forkers:
            if forker.output is not None:
                forker.output.end_call()
        return result

    def _answer(self, key: int, kind: Stage, message: Any) -> Observation | EpisodeOutcome | Lost:
        """Send one request and wait for the answer, which may be the end of the environment."""
        episode: _Episode | None = self._open.get(key)
        if episode is None:
            return Lost()
        with episode.in_use:
            answer = episode.ask(kind, message)
        self._note(key, kind, answer)
        return answer


def _allow_files(count: int) -> None:
    """Allow this process so many open files, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        more = count if hard == resource.RLIM_INFINITY else min(2 * count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


class _ForkServer(Child):
    """The process that forks the others."""

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        tools: Sequence[EnvironmentSpec],
        limits: tuple[int, float, float],
    ) -> None:
        self.failure = ""
        """Reason why it ended; empty while it runs."""
        self._lock = threading.Lock()
        self._last = 0
        """Number of the last process."""
        self._folder = tempfile.TemporaryDirectory(prefix="grpox-episodes-", ignore_cleanup_errors=True)
        # Sets of texts have an order of their own in each process, unless their hashes have a seed.
        variables = {"PYTHONHASHSEED": "0", **os.environ}
        command = ["-P", "-m", "grpox.rollout.episodes.forker"]
        super().__init__(command, STALL_SECONDS, output="the environments", environment=variables)
        self._orders = socket.socket(fileno=os.dup(self.connection.fileno()))
        try:
            self.send(pickle.dumps((environments, tools, sys.path, limits, self._folder.name)))
            answer = self.receive(time.monotonic() + LOAD_SECONDS)
            if problems := _Answers(io.BytesIO(answer)).load():
                raise ConfigError(problems)
        except ChildFailed as error:
            self.kill()
            what = "the process of the environments ended, or took too long, as it imported them"
            raise ConfigError(what, "environment", allowed="episodes.isolation: none shows why") from error
        except BaseException:
            self.kill()
            raise

    def fork(self, connection: socket.socket) -> int:
        """Start the process of an episode, and return its number.

        Raises:
            OSError: the forker has ended.
        """
        with self._lock:
            self._last += 1
            socket.send_fds(self._orders, [ORDER.pack(FORK, self._last)], [connection.fileno()])
            return self._last

    def end_episode(self, number: int, is_killed: bool) -> str:
        """Wait until the process of an episode has ended, and return the reason; empty if the forker has ended.

        Args:
            is_killed: True to kill it; else it has a moment to end by itself.
        """
        with self._lock:
            try:
                self._orders.send(ORDER.pack(KILL if is_killed else END, number))
                return self.receive(time.monotonic() + STOP_SECONDS).decode("utf-8", "replace")
            except ChildLate:
                what = f"was stopped for more than {STOP_SECONDS:g} s, by an environment or from outside"
            except (ChildFailed, OSError):
                what = "has ended"
            self.failure = self.failure or what
            super().kill()  # with what the forker can no longer end
            return ""

    def kill(self) -> None:
        """End the process; all its environments end with it."""
        self.failure = self.failure or "was ended"
        with contextlib.suppress(OSError):
            self._orders.shutdown(socket.SHUT_WR)  # it then kills also what has left its session
        deadline = time.monotonic() + END_SECONDS
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            super().kill()
            self._orders.close()
        self._folder.cleanup()


class _Episode(Child):
    """The process of one episode, which is forked as the first request is sent.

    Args:
        start: its first message, pickled.
        seconds: time limit of a call.
        grace: seconds after it in which a call that does not end is killed.
    """

    def __init__(self, forker: _ForkServer, start: bytes, seconds: float, grace: float) -> None:
        self.forker = forker
        self._start = start
        self.in_use = threading.RLock()
        self._seconds, self._grace = seconds, grace
        self._number = 0
        """Its number at the forker; 0 before it is forked."""

    def ask(self, kind: Stage, message: Any) -> Observation | EpisodeOutcome | Lost:
        """Return the answer to a request; after the last one, or where the process is lost, it is gone."""
        what, deadline = "", time.monotonic() + self._seconds + self._grace
        try:
            if kind == Stage.START:
                near, far = socket.socketpair()
                with far:
                    self._connect(near, STALL_SECONDS, MOST_ANSWER)
                    self._number = self.forker.fork(far)
                deadline = time.monotonic() + STALL_SECONDS
            self.send(bytes([kind]) + (self._start if kind == Stage.START else pickle.dumps(message)))
            while (received := self.receive(deadline)).startswith(b"\0"):
                deadline = time.monotonic() + CALL.unpack_from(received)[0] + self._grace
                what = f" in {received[CALL.size :].decode('utf-8', 'replace')}"
            answer = _Answers(io.BytesIO(received)).load()
        except ChildEnded:
            return self._lost("", what)
        except ChildLate:
            return self._lost(f"took longer than {self._seconds:g} s and could not be interrupted{what}")
        except ChildCut:
            return self._lost(
                f"answered with more than {format_bytes(MOST_ANSWER)}, or stopped in its midst{what}"
            )
        except OSError as error:
            return self._lost(f"no process could be started for it: {describe(error)}")
        except Exception as error:  # noqa: BLE001 - whatever an environment's process sent
            return self._lost(f"answered what cannot be read: {describe(error)}")
        if not isinstance(answer, Observation | EpisodeOutcome):
            return self._lost(f"answered with a {type(answer).__name__}")
        if kind in LAST:
            self.connection.close()  # the process ends by itself
        return answer

    def has_ended(self) -> bool:
        """Return True once the forker has ended; the end of the process itself closes its connection."""
        return bool(self.forker.failure) or self.forker.has_ended()

    def _lost(self, reason: str, what: str = "") -> Lost:
        """End the process; tell why it is lost.

        Args:
            reason: empty if it ended by itself.
            what: its last call, then.
        """
        reported = self.forker.end_episode(self._number, is_killed=bool(reason)) if self._number else ""
        if self._number:
            self.connection.close()
        if self.forker.failure:
            return Lost(f"the process of all environments {self.forker.failure}")
        return Lost(reason or f"{reported}{what}")


class _Answers(pickle.Unpickler):
    """Reads answers without loading any other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ANSWERS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an answer")
        return super().find_class(module, name)
