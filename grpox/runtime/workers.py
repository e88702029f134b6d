"""Worker processes: started, called within limits of time and output, and killed with all that they started.

Messages go over a socket, which is the child's standard input, framed as in `multiprocessing.connection`: four
bytes of length, highest first, and the message. The child is a new Python process, not a fork: it needs no
importable ``__main__``, so it also works in notebooks, and it has neither the parent's torch nor its locks.

Every process ends with its parent in one way: it has one end of a pipe, the lifeline, whose other end only the
parent holds. As that is closed, also by the parent's death, the kernel kills the process and its group.

    python -m grpox.runtime.workers [SIGNAL] COMMAND ... LIFELINE

becomes another program, which then ends with its parent as well, by that signal instead of SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpox.runtime.logs import LEVEL_VARIABLE, get_logger, show_logs

logger = get_logger(__name__)
LOOK_SECONDS = 0.1
"""Seconds between two checks of a working child."""
MOST_BYTES = 1 << 30
"""Largest answer in bytes, so that the child cannot fill the parent's memory."""
LAST_BYTES = 2000
"""Number of bytes of a child's output that are kept for messages."""
END_SECONDS = 2.0
"""Seconds that a child has to end after it has closed its connection."""
MOST_PRINTED = 1 << 20
"""Bytes of a call that are passed on, of both streams together."""


class ChildFailed(Exception):
    """Raised if no answer arrived; the child must be killed."""


class ChildLate(ChildFailed):
    """Raised if the child exceeded its time limit."""


class ChildEnded(ChildFailed):
    """Raised if the child ended or closed its connection."""


class ChildCut(ChildFailed):
    """Raised if the answer is larger than `MOST_BYTES` or incomplete."""


class Child:
    """One process in its own process group, from start to end.

    Args:
        arguments: arguments of Python; the file descriptor for `connect_to_parent` is appended.
        stall: seconds that the child may pause within a message.
        output: file descriptors for its output, or its name, with which `ChildOutput` passes it on; by default
            both streams go to a file, see `printed`.
        pass_fds: file descriptors that the child inherits.
        environment: whole environment of the child; default: this process's.
        folder: working directory of the child; default: this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        stall: float,
        *,
        output: tuple[int, int] | str = "",
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.printed = ""
        """End of the child's output, available once it is killed."""
        self._ending = threading.Lock()
        # A file, because a pipe that nobody reads would block the child once it is full.
        self._prints = None if output else tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self.output = ChildOutput(output) if output and isinstance(output, str) else None
        streams: Any = output or (self._prints, self._prints)
        if self.output is not None:
            streams = self.output.stdout, self.output.stderr
        near, far = socket.socketpair()
        self._connect(near, stall)
        lifeline, ours = os.pipe()
        self._lifeline = os.fdopen(ours, "wb", buffering=0)
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, *arguments, str(lifeline)],
                stdin=far.fileno(),
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=(lifeline, *pass_fds),
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        finally:
            far.close()
            os.close(lifeline)
            if self.output is not None:
                self.output.start()
        logger.debug("started process %s: %s", self.pid, " ".join(arguments))

    def _connect(self, end: socket.socket, stall: float, largest: int | None = None) -> None:
        """Take the end of a connection; `largest` is the most bytes of an answer, by default `MOST_BYTES`."""
        limit = struct.pack("ll", int(stall) + 1, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.in_use = threading.RLock()
        """Locked by the asking thread, so that the replies for two threads are not mixed up."""
        self.connection = Connection(end.detach())
        self._largest = largest

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ChildLate: the child did not read.
            ChildEnded: the child has ended or closed its connection.
        """
        try:
            self.connection.send_bytes(message)
        except BlockingIOError as error:
            raise ChildLate from error
        except OSError as error:
            raise ChildEnded from error

    def receive(self, deadline: float, look: Callable[[], object] | None = None) -> bytes:
        """Wait for the next message.

        Args:
            deadline: time limit by time.monotonic.
            look: called repeatedly; an exception ends the wait.

        Raises:
            ChildFailed: no message arrived.
        """
        try:
            while not self.connection.poll(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                if self.has_ended() and not self.connection.poll(0):
                    raise ChildEnded
                if time.monotonic() >= deadline:
                    raise ChildLate
                if look is not None:
                    look()
            return self.connection.recv_bytes(self._largest or MOST_BYTES)
        except (EOFError, ConnectionResetError) as error:
            raise ChildEnded from error
        except OSError as error:
            # Closed: it was killed by another thread before this call.
            raise (ChildEnded if self.connection.closed else ChildCut) from error

    def has_ended(self) -> bool:
        """Return True once the process has ended.

        The process is not reaped, so that its number stays reserved for its group until the group is killed.
        """
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has killed and reaped it
            return True

    def end(self) -> int | None:
        """Kill the group if the process has ended by itself; return the exit code, or None if it still runs."""
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
        """Kill the process and all processes in its session."""
        with self._ending:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                while not self.has_ended():  # it starts no others any more, and is not yet reaped
                    time.sleep(0.001)
                _kill_session(self.pid)
                self._process.wait()
                logger.debug("process %s has ended with code %s", self.pid, self._process.returncode)
                if self._prints is not None:
                    with self._prints as file:
                        begin = max(0, os.fstat(file.fileno()).st_size - LAST_BYTES)
                        last = os.pread(file.fileno(), LAST_BYTES, begin)
                    self.printed = last.decode("utf-8", "replace").strip()
        # A thread that still reads may see another file under the closed number: it then notices the end of the
        # process and kills it again.
        if self.in_use.acquire(blocking=False):
            try:
                self._lifeline.close()
                self.connection.close()
            finally:
                self.in_use.release()
        self._end_call()

    def _end_call(self) -> None:
        """Pass on what it has printed so far, see `ChildOutput.end_call`."""
        if self.output is not None:
            self.output.end_call()


def _kill_session(leader: int) -> None:
    """Kill the processes of a session whose leader has ended, in whichever groups they are."""
    killed: set[int] = set()
    while rest := _session(leader) - killed - {leader}:  # again: one may have been about to fork
        for pid in rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= rest


def _session(leader: int) -> set[int]:
    """Return the processes of a session."""
    pids = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(name)) == leader:
                pids.add(int(name))
    return pids


def end_text(code: int) -> str:
    """Describe the end of a process by its exit code, or by the signal that ended it, as a negative number."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    by = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "real-time"
    return f"lost its process to signal {-code} ({name}{by})"


AnyChild = TypeVar("AnyChild", bound=Child)


class Restarted(Generic[AnyChild]):
    """Owns one child, which is started on demand, and again after a stop.

    The child is killed when this object is deleted or this process ends.
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
        """Kill the child permanently."""
        self.is_closed = True
        self.stop()


class ChildOutput:
    """Reads both streams of one process in a thread of its own, so that printing never blocks the process.

    Beyond the limit everything is read too, and dropped. The thread ends once nobody holds the other ends: the
    process and those that it has started.

    Args:
        source: name in the line about dropped output: ``reward 'judge'``.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._left = MOST_PRINTED
        self._dropped = 0
        self._in_line = False
        """True where the last byte that was passed on ends no line."""
        out, self.stdout = os.pipe()
        err, self.stderr = os.pipe()
        self._streams = {out: 1, err: 2}  # end to read -> where the trainer prints
        for end in self._streams:
            os.set_blocking(end, False)

    def start(self) -> None:
        """Begin to read; `stdout` and `stderr` are the process's alone from here on."""
        os.close(self.stdout)
        os.close(self.stderr)
        threading.Thread(target=self._follow, name="grpox-child-output", daemon=True).start()

    def end_call(self) -> None:
        """Pass on what the process has printed so far, tell how much was dropped, and begin to count anew."""
        with self._lock:
            for end in list(self._streams):
                self._read(end)
            if self._dropped:
                begin = "\n" if self._in_line else ""
                note = f"{self._dropped:,} further bytes that {self._source} printed in this call"
                _write(2, f"{begin}... {note} are not shown\n".encode())
            self._left, self._dropped, self._in_line = MOST_PRINTED, 0, False

    def _follow(self) -> None:
        # poll, not select, which fails on file descriptors above 1023.
        poller = select.poll()
        for end in self._streams:
            poller.register(end, select.POLLIN)
        while self._streams:
            ready = poller.poll()
            with self._lock:
                for end, _ in ready:
                    if self._read(end):
                        poller.unregister(end)
                        del self._streams[end]
                        os.close(end)

    def _read(self, end: int) -> bool:
        """Pass on what is there; return True at the end of the stream."""
        try:
            read = os.read(end, 1 << 16)  # all that a pipe holds
        except BlockingIOError:  # the other thread was first
            return False
        shown = read[: self._left]
        self._left -= len(shown)
        self._dropped += len(read) - len(shown)
        if shown:
            self._in_line = not shown.endswith(b"\n")
            _write(self._streams[end], shown)
        return not read


def _write(descriptor: int, data: bytes) -> None:
    """Write all; where nobody reads the trainer's output, or it has none, it is lost."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def connect_to_parent() -> Connection:
    """Return, in the child, the connection to its parent; the child ends together with the parent.

    Standard input is then empty. The last argument is the number of a pipe, see `end_with`.
    """
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end_with(int(sys.argv[-1]))
    return connection


@contextlib.contextmanager
def serving_parent() -> Iterator[Connection]:
    """Connect to the parent, in a child that runs users' code, and prepare it for that.

    What it prints is seen also if it is killed. When memory runs out, it is ended before the trainer. Where the
    parent has closed the connection, the whole group is killed: nobody else would kill what that code started.
    """
    connection = connect_to_parent()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with ends_with_connection():
        if level := os.environ.get(LEVEL_VARIABLE):
            show_logs(level)
        yield connection


@contextlib.contextmanager
def ends_with_connection() -> Iterator[None]:
    """Kill this group where the block finds that the other end of its connection is closed."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os.killpg(0, signal.SIGKILL)


def flush_output() -> None:
    """Write what has been printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced, by users' code
            stream.flush()


def end_with(lifeline: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel end this group once no process holds the other end of a pipe, even if it hangs in C.

    PR_SET_PDEATHSIG is not used, because it acts when the starting thread ends.

    Args:
        number: signal that ends it; one that a program may handle goes to this process alone.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp() if number == signal.SIGKILL else os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, number)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    if poller.poll(0):  # the other end was closed before the kernel was asked
        os._exit(1)


def main() -> None:
    """Become another program."""
    connect_to_parent()
    if sys.argv[1].isdecimal():
        end_with(int(sys.argv[-1]), int(sys.argv.pop(1)))
    os.execvp(sys.argv[1], sys.argv[1:-1])


if __name__ == "__main__":
    main()
