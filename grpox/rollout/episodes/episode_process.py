"""The process of one episode: it serves one instance of an environment, within limits of time and memory."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from grpox.environments.calling import CANCEL_SECONDS, CallTimeout, Settled, drive, settle
from grpox.rollout.episodes.host import Host
from grpox.rollout.episodes.loading import EnvironmentClass
from grpox.rollout.episodes.messages import LAST, Stage
from grpox.runtime.setup import seed_libraries
from grpox.runtime.workers import ends_with_connection, flush_output

REPEAT_SECONDS = 0.5
"""Seconds after which a call that went on in spite of CallTimeout is interrupted again."""
END_SECONDS = 2
"""Seconds that a process has to end after its last answer."""
CALL = struct.Struct("!xd")
"""Head of the message that a call begins: a zero, and its time limit in seconds, before its name."""


class SignalLimit:
    """Interrupts calls in the main thread that take longer than so many seconds.

    Args:
        connection: to the trainer, which learns of each call, and kills the process if one goes on.
    """

    def __init__(self, seconds: float, connection: Connection) -> None:
        self._seconds, self._connection = seconds, connection
        self._own = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of this process, which keeps clients alive between turns; made when it is needed."""
        self._what = ""
        self._is_armed = False

    @contextmanager
    def __call__(self, what: str, more: float = 0.0) -> Iterator[None]:
        """Limit a block; `more` is added to the time."""
        self._what = what
        seconds = self._seconds + more
        if os.getpid() == self._own:  # else the environment forked, and this is the child
            self._connection.send_bytes(CALL.pack(seconds) + what.encode("utf-8", "replace"))
        signal.signal(signal.SIGALRM, self._raise)  # a call before may have put its own
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_SECONDS)
        try:
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def run(self, awaitables: list[Awaitable[Any]]) -> list[Settled]:
        """Run awaitables together; interrupt any that block the loop or defy their cancellation."""
        ends: list[Settled] = []
        loop = self._loop = self._loop or asyncio.new_event_loop()
        try:
            with self(self._what, CANCEL_SECONDS + REPEAT_SECONDS):
                loop.run_until_complete(settle(awaitables, self._seconds, ends))
        except CallTimeout:
            for task in asyncio.all_tasks(loop):
                task.cancel()
        return ends or [Settled(is_late=True)] * len(awaitables)

    def close(self) -> None:
        """Close the event loop."""
        if self._loop is not None:
            with suppress(Exception):
                self._loop.close()

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            raise CallTimeout


def serve_episode(
    connection: Connection,
    classes: Sequence[EnvironmentClass],
    limits: tuple[int, float, float],
    folder: str,
) -> NoReturn:
    """Answer requests until the last one, and end the process.

    Args:
        connection: to the trainer.
        limits: most calls of a turn, seconds of a call, GiB of memory.
        folder: its folder for temporary files, which is removed at the end.
    """
    max_calls, seconds, memory = limits
    most = int(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    limit = SignalLimit(seconds, connection)
    own, code = os.getpid(), 0
    kind, host = Stage.START, None
    try:
        with ends_with_connection():
            while kind not in LAST:
                received = connection.recv_bytes()
                kind, message = Stage(received[0]), pickle.loads(received[1:])
                if host is None:
                    seed_libraries(message.seed)
                    host = Host(classes[message.environment], max_calls, seconds, limit)
                answer = drive(host.answer(kind, message), limit.run)
                if os.getpid() != own:  # the environment forked, and this is the child
                    os._exit(0)
                if kind in LAST:
                    limit.close()
                flush_output()
                connection.send_bytes(pickle.dumps(answer))
        # Run finalizers, such as those of temporary folders; the alarm ends a process whose finalizer hangs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_SECONDS)
        gc.collect()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    flush_output()
    if os.getpid() == own:  # else the environment forked, and this is the child
        # The forker does so as well, for killed processes; here it holds up no other episode.
        shutil.rmtree(folder, ignore_errors=True)
        _end_group()
    # Not sys.exit: it would run the exit handlers of the process that forked this one.
    os._exit(code & 0xFF)


def _end_group() -> None:
    """Kill what the environment has started in this group: the forker, which does so too, may end before."""
    group = os.getpgrp()
    with suppress(OSError):  # the forker has ended and has no group to join: this process is killed as well
        os.setpgid(0, os.getppid())
    with suppress(ProcessLookupError):  # there was nothing
        os.killpg(group, signal.SIGKILL)
