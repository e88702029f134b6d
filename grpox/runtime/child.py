"""A child process that is asked by messages, and killed with all that it has started when it takes too long.

Messages go over a socket, which is the child's standard input, framed as `multiprocessing.connection` does it:
four bytes of length, the highest first, and the message. The child is a Python of its own, not a fork: it needs
no importable ``__main__``, so it works in notebooks too, and has neither the parent's torch nor its locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from grpox.runtime.logs import get_logger

logger = get_logger(__name__)
LOOK_SECONDS = 0.1
"""Between two looks at a child that works."""
MOST_BYTES = 1 << 30
"""Largest answer: beyond, the child's memory would become the parent's."""
LAST_BYTES = 2000
"""Bytes of a child's output that are kept for messages."""
END_SECONDS = 2.0
"""A child that has closed its connection has this long to end by itself."""


class ChildFailed(Exception):
    """No answer came; the child is to be killed."""


class ChildLate(ChildFailed):
    """The time was over."""


class ChildEnded(ChildFailed):
    """The child ended, or closed its connection."""


class ChildCut(ChildFailed):
    """The answer is larger than `MOST_BYTES`, or stopped in its midst."""


class Child:
    """One process in a group of its own, from its start to its end.

    Args:
        arguments: of this Python; behind them stands the file descriptor for `connect_to_parent`.
        stall: seconds that the child may stop in the middle of a message.
        output: file descriptors for what it prints; by default both go to a file, see `printed`.
        pass_fds: file descriptors that it inherits.
        environment: all of it; by default this process's.
        folder: its current one; by default this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        stall: float,
        *,
        output: tuple[int, int] | None = None,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.in_use = threading.RLock()
        """AnyChild by the thread that asks: replies of two would be mixed up."""
        self.printed = ""
        """The end of what it printed, once it is killed."""
        self._ending = threading.Lock()
        # A file, because a pipe that nobody reads would block the child once it is full.
        self._prints = None if output else tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        stdout, stderr = output or (self._prints, self._prints)
        near, far = socket.socketpair()
        limit = struct.pack("ll", int(stall) + 1, 0)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        lifeline, ours = os.pipe()
        self._lifeline = os.fdopen(ours, "wb", buffering=0)
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, *arguments, str(lifeline)],
                stdin=far.fileno(),
                stdout=stdout,
                stderr=stderr,
                pass_fds=(lifeline, *pass_fds),
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        finally:
            far.close()
            os.close(lifeline)
        self._connection = Connection(near.detach())
        logger.debug("started process %s: %s", self.pid, " ".join(arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ChildLate: it did not read.
            ChildEnded: it reads no more.
        """
        try:
            self._connection.send_bytes(message)
        except BlockingIOError as error:
            raise ChildLate from error
        except OSError as error:
            raise ChildEnded from error

    def receive(self, deadline: float, look: Callable[[], object] | None = None) -> bytes:
        """Wait for the next message.

        Args:
            deadline: by time.monotonic.
            look: called again and again; what it raises ends the wait.

        Raises:
            ChildFailed: none came.
        """
        try:
            while not self._connection.poll(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                if self.has_ended():
                    raise ChildEnded
                if time.monotonic() >= deadline:
                    raise ChildLate
                if look is not None:
                    look()
            return self._connection.recv_bytes(MOST_BYTES)
        except (EOFError, ConnectionResetError) as error:
            raise ChildEnded from error
        except OSError as error:
            # Closed: it was killed by another thread before this call.
            raise (ChildEnded if self._connection.closed else ChildCut) from error

    def has_ended(self) -> bool:
        """Return True once the process has ended.

        It is not reaped by this, so that its number stays that of its group until the group is killed.
        """
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has killed and reaped it
            return True

    def end(self) -> int | None:
        """Kill its group if the process ends by itself; return the exit code, or None if it goes on."""
        deadline = time.monotonic() + END_SECONDS
        while not self.has_ended():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        self.kill()
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has been killed."""
        with self._ending:
            if self._process.returncode is None:  # else its number may be another's by now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and all that it has started and that has not left its group."""
        with self._ending:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
                logger.debug("process %s has ended with code %s", self.pid, self._process.returncode)
                if self._prints is not None:
                    with self._prints as file:
                        begin = max(0, os.fstat(file.fileno()).st_size - LAST_BYTES)
                        last = os.pread(file.fileno(), LAST_BYTES, begin)
                    self.printed = last.decode("utf-8", "replace").strip()
        # A thread that reads from it may find another file under the number of the one closed here: that thread
        # sees the end of the process, and kills it again.
        if self.in_use.acquire(blocking=False):
            try:
                self._lifeline.close()
                self._connection.close()
            finally:
                self.in_use.release()


class _Killable(Protocol):
    def kill(self) -> None: ...


AnyChild = TypeVar("AnyChild", bound=_Killable)


class Restarted(Generic[AnyChild]):
    """Holds one child, which is started when it is asked for, and again after each one that was stopped.

    Once nobody has this any more, or this process ends, the child is killed.
    """

    def __init__(self, start: Callable[[], AnyChild]) -> None:
        self.current: AnyChild | None = None
        self.is_closed = False
        self._start = start
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def get(self) -> AnyChild:
        """Return the child; raises ChildEnded after `close`."""
        with self._lock:
            if self.is_closed:
                raise ChildEnded
            if self.current is None:
                self.current = self._start()
                self._finalizer = weakref.finalize(self, self.current.kill)
            return self.current

    def stop(self) -> None:
        """Kill the child; the next `get` starts another."""
        with self._lock:
            self.current, finalizer, self._finalizer = None, self._finalizer, None
        if finalizer is not None:
            finalizer()

    def close(self) -> None:
        """Kill the child for good."""
        self.is_closed = True
        self.stop()


def connect_to_parent() -> Connection:
    """Return, in the child, the connection to its parent, with which it ends together.

    Standard input is nothing from then on. The kernel kills this process group once nobody holds the other end
    of the pipe whose number is the last argument: it needs nothing of this process, which may hang in C. Not
    PR_SET_PDEATHSIG, which acts when the thread that started this process ends.
    """
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    lifeline = int(sys.argv[-1])
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    return connection
