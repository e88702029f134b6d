"""The program that forks a process for each episode of a rank.

Started as ``python -m grpox.rollout.episodes.forker``. It imports the environments once, without torch, passes
requests to the processes and answers to the trainer, and ends processes that hang. Each process leads a group
of its own. All end with this program, and it ends with the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

from grpox.errors import ConfigError, Problem, describe
from grpox.errors.formatting import format_bytes
from grpox.rollout.episodes.episode_process import LAST, Progress, Request, serve_episode
from grpox.rollout.episodes.loading import EnvironmentClass, load_environments
from grpox.rollout.episodes.messages import Blueprint
from grpox.runtime.child import connect_to_parent, end_with
from grpox.runtime.logs import show_logs_of_child

LINK = struct.Struct("!QQB")
"""Head of messages between trainer and forker: key of the episode, number of the request, kind."""
SHUT, ANSWER, LOST = 16, 17, 18
"""Kinds beside `Request`: end everything; an answer; the process has ended."""
UNASKED = 0
"""Number of a message that answers no request."""
MOST_ANSWER = 64 << 20
"""Largest answer of a process in bytes."""
END_SECONDS = 2.0
"""Seconds that a process has to end after its last answer."""
SEND_SECONDS = 1
"""Seconds that an idle process has to read a request."""
SWEEP_SECONDS = 1.0
"""Seconds between two searches for processes that left the group of an episode that has ended."""
_LIBC, _SUBREAPER = ctypes.CDLL(None), 36  # PR_SET_CHILD_SUBREAPER
_LENGTH = struct.Struct("!i")  # how multiprocessing.connection begins a message


@dataclass(frozen=True)
class Setup:
    """The first message to the forker."""

    environments: tuple[Blueprint, ...]
    tools: tuple[Blueprint, ...]
    import_path: tuple[str, ...]
    """The trainer's `sys.path`."""
    max_calls: int
    seconds: float
    """Time limit of a call."""
    grace: float
    """Seconds after the time limit in which a call that does not end is killed."""
    memory: float
    concurrency: int
    folder: str
    """Folder of the temporary folders of the processes, each named by its process."""


@dataclass
class _Process:
    """The process of one episode."""

    key: int
    pid: int
    connection: Connection
    progress: Progress
    request: int = UNASKED
    """Number of the request that it is at."""
    kind: Request = Request.START
    is_busy: bool = True
    answer: bytearray = field(default_factory=bytearray)
    """Part of the answer that has arrived."""
    later: list[bytes] = field(default_factory=list)
    """Requests that arrived while it was busy."""
    reason: str = ""
    """Reason why it was killed."""
    ends_by: float = 0.0
    """Deadline of its end after its last answer."""


def main() -> None:
    """Load the environments, tell the trainer how that went, and serve."""
    trainer = connect_to_parent()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # when memory runs out, an episode is lost, not the run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    try:
        show_logs_of_child()
        setup: Setup = pickle.loads(trainer.recv_bytes())
        classes, problems = _loaded(setup)
        trainer.send_bytes(pickle.dumps(problems))
        if not problems:
            _Forker(trainer, setup, classes).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The trainer has ended, so that nobody else would kill what the environments' modules have started.
        os.killpg(0, signal.SIGKILL)


def _loaded(setup: Setup) -> tuple[list[EnvironmentClass], tuple[Problem, ...]]:
    sys.path[:] = setup.import_path
    try:
        return load_environments(setup.environments, setup.tools), ()
    except ConfigError as error:
        return [], tuple(error.problems)
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises is reported
        return [], (Problem(f"the environments cannot be loaded: {describe(error)}", "environment"),)


class _Forker:
    def __init__(self, trainer: Connection, setup: Setup, classes: list[EnvironmentClass]) -> None:
        self._trainer, self._setup, self._classes = trainer, setup, classes
        self._waiting: deque[bytes] = deque()
        self._by_key: dict[int, _Process] = {}
        self._by_pid: dict[int, _Process] = {}
        self._busy: dict[int, _Process] = {}
        """Processes at work, by the number of their connection's file."""
        self._ending: dict[int, _Process] = {}
        """Processes that must end by themselves, by pid."""
        self._of_modules = {each.pid for each in psutil.Process().children()}
        """Processes that the environments' modules started as they were imported."""
        self._is_shut = False
        self._swept = 0.0
        self._needs_sweep = False
        self._limit_of_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limit_of_files[1],) * 2)
        _adopt_orphans()
        # Every process opens the end to read anew, so that each has an owner of its own.
        self._lifeline, self._lifeline_end = os.pipe()
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        self._poller = select.poll()
        self._poller.register(trainer.fileno(), select.POLLIN)
        self._poller.register(self._wake, select.POLLIN)
        gc.collect()
        gc.freeze()  # a collection in a process would copy the pages that it shares with this one

    def run(self) -> None:
        """Serve until the trainer says that it is over, and all processes have ended."""
        while not (self._is_shut and not self._by_pid):
            self._begin_waiting()
            for file, _ in self._poller.poll(self._poll_milliseconds()):
                if file == self._trainer.fileno():
                    self._receive()
                elif file == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 1 << 16)
                elif process := self._busy.get(file):
                    self._hear(process)
            self._reap()
            self._kill_late()
            self._sweep()
        self._sweep(until_none=True)

    # -- Requests ----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        message = self._trainer.recv_bytes()
        if LINK.unpack_from(message)[2] != SHUT:
            self._waiting.append(message)
            return
        self._is_shut = True
        self._waiting.clear()
        for process in self._by_key.values():
            process.later.clear()
            if not (process.is_busy and process.kind in LAST):
                self._waiting.append(LINK.pack(process.key, UNASKED, Request.CLOSE))

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._busy) < self._setup.concurrency:
            message = self._waiting.popleft()
            key, request, kind = LINK.unpack_from(message)
            process = self._by_key.get(key)
            if kind == Request.START:
                self._start(key, request, message[LINK.size :])
            elif process is None:
                self._tell(key, request, LOST, b"")  # the trainer has its reason
            elif process.is_busy:
                process.later.append(message)
            else:
                self._ask(process, request, Request(kind), message[LINK.size :])

    def _start(self, key: int, request: int, payload: bytes) -> None:
        try:
            process = self._fork(key, payload)
        except OSError as error:  # no more processes or files
            self._tell(key, request, LOST, f"no process could be started for it: {describe(error)}".encode())
            return
        process.request = request
        self._by_key[key] = self._by_pid[process.pid] = process
        self._await(process)

    def _ask(self, process: _Process, request: int, kind: Request, payload: bytes) -> None:
        process.request, process.kind = request, kind
        process.progress.note("", time.monotonic() + self._setup.seconds)
        self._await(process)
        try:
            process.connection.send_bytes(bytes([kind]) + payload)
        except BlockingIOError:
            self._kill(process, "did not read its request")
        except OSError:
            pass  # it has ended: `_reap` says how

    def _await(self, process: _Process) -> None:
        process.is_busy = True
        self._busy[process.connection.fileno()] = process
        self._poller.register(process.connection.fileno(), select.POLLIN)

    # -- Answers -----------------------------------------------------------------------------------------

    def _hear(self, process: _Process) -> bool:
        """Read what has arrived of an answer, and pass it on once it is complete; return False at the end."""
        try:
            read = os.read(process.connection.fileno(), 1 << 18)
        except OSError:
            read = b""
        process.answer += read
        if not read:  # it is ending, or has closed its connection
            self._unwatch(process)
            self._let_end(process)
        elif len(process.answer) > MOST_ANSWER:
            self._kill(process, f"answered with more than {format_bytes(MOST_ANSWER)}")
        elif len(process.answer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(process.answer)
            if length < 0 or len(process.answer) > length + _LENGTH.size:
                self._kill(process, "wrote into its connection")
            elif len(process.answer) == length + _LENGTH.size:
                self._pass_on(process)
        return bool(read)

    def _pass_on(self, process: _Process) -> None:
        self._tell(process.key, process.request, ANSWER, bytes(process.answer[_LENGTH.size :]))
        process.answer.clear()
        self._unwatch(process)
        process.request, process.is_busy = UNASKED, False
        del self._busy[process.connection.fileno()]
        if process.kind in LAST:
            del self._by_key[process.key]
            self._let_end(process)
        self._waiting.extendleft(reversed(process.later))
        process.later.clear()

    def _unwatch(self, process: _Process) -> None:
        with contextlib.suppress(KeyError):  # it had closed its connection before
            self._poller.unregister(process.connection.fileno())

    def _let_end(self, process: _Process) -> None:
        process.ends_by = time.monotonic() + END_SECONDS
        self._ending[process.pid] = process

    def _tell(self, key: int, request: int, kind: int, payload: bytes) -> None:
        self._trainer.send_bytes(LINK.pack(key, request, kind) + payload)

    # -- Ends --------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Note the processes that have ended; a group is killed before its number is free for another."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, flags)) is not None:
                process = self._by_pid.pop(ended.si_pid, None)
                if process is not None:
                    self._drain(process)
                    _kill_group(process.pid)
                os.waitpid(ended.si_pid, 0)
                if process is not None:
                    self._forget(process, ended)

    def _drain(self, process: _Process) -> None:
        """Read the answer that a process gave right before its end."""
        poller = select.poll()
        poller.register(process.connection.fileno(), select.POLLIN)
        while process.is_busy and poller.poll(0) and self._hear(process):
            pass

    def _forget(self, process: _Process, ended: os.waitid_result) -> None:
        self._needs_sweep = True
        shutil.rmtree(_temporary_folder(self._setup.folder, process.pid), ignore_errors=True)
        self._ending.pop(process.pid, None)
        if process.is_busy:
            del self._busy[process.connection.fileno()]
            self._unwatch(process)
        process.connection.close()
        if self._by_key.get(process.key) is process:
            del self._by_key[process.key]
            reason = process.reason or _reason(ended.si_code, ended.si_status)
            during = f" in {process.progress.what}" if process.is_busy and process.progress.what else ""
            self._tell(process.key, process.request, LOST, f"{reason}{during}".encode())
            self._waiting.extendleft(reversed(process.later))

    def _kill_late(self) -> None:
        now = time.monotonic()
        for process in self._busy.values():
            if now > process.progress.deadline + self._setup.grace:
                seconds = f"{self._setup.seconds:g} s"
                self._kill(process, f"took longer than {seconds} and could not be interrupted")
        for process in self._ending.values():
            if now > process.ends_by:
                self._kill(process, "closed its connection")

    def _kill(self, process: _Process, reason: str) -> None:
        """Kill a process and its group; `_reap` then notes its end."""
        process.reason = process.reason or reason
        if process.pid in self._by_pid:  # else it has ended, and its number may be another's
            _kill_group(process.pid)

    def _poll_milliseconds(self) -> float | None:
        """Return the time to the next deadline; those of calls that begin later are later."""
        deadlines = [process.progress.deadline + self._setup.grace for process in self._busy.values()]
        deadlines += [process.ends_by for process in self._ending.values()]
        if self._needs_sweep:
            deadlines.append(self._swept + SWEEP_SECONDS)
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

    def _sweep(self, until_none: bool = False) -> None:
        """Kill processes that left the groups of ended episodes: this process has adopted them.

        Those of an episode that goes on belong to its own process, which adopts too.
        """
        if not until_none and not (self._needs_sweep and time.monotonic() > self._swept + SWEEP_SECONDS):
            return
        deadline = time.monotonic() + END_SECONDS
        known = self._by_pid.keys() if until_none else self._by_pid.keys() | self._of_modules
        while True:
            strangers = [each for each in psutil.Process().children() if each.pid not in known]
            self._needs_sweep = bool(strangers)  # this process adopts the children of those that it kills
            for stranger in strangers:
                with contextlib.suppress(psutil.Error):
                    stranger.kill()
            if not strangers or not until_none or time.monotonic() > deadline:
                break
            self._reap()
            time.sleep(0.01)
        self._swept = time.monotonic()

    # -- Forks -------------------------------------------------------------------------------------------

    def _fork(self, key: int, start: bytes) -> _Process:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        connection, other = Connection(near.detach()), Connection(far.detach())
        progress = Progress()
        progress.note("", time.monotonic() + self._setup.seconds)
        try:
            pid = os.fork()
        except OSError:
            connection.close()
            other.close()
            raise
        if pid == 0:
            self._serve(connection, other, start, progress)
        other.close()
        with contextlib.suppress(OSError):  # the process itself was first
            os.setpgid(pid, pid)
        return _Process(key, pid, connection, progress)

    def _serve(self, near: Connection, far: Connection, start: bytes, progress: Progress) -> NoReturn:
        """Become the process of an episode."""
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            own = [self._trainer, near, *(process.connection for process in self._by_pid.values())]
            files = [int(sys.argv[-1]), self._lifeline_end, self._wake, self._wake_end]
            for file in [*files, *(connection.fileno() for connection in own)]:
                os.closerange(file, file + 1)  # the objects stay: closing them would close others' files later
            end_with(os.open(f"/proc/self/fd/{self._lifeline}", os.O_RDONLY | os.O_NONBLOCK))
            os.closerange(self._lifeline, self._lifeline + 1)
            _adopt_orphans()
            resource.setrlimit(resource.RLIMIT_NOFILE, self._limit_of_files)
            folder = _temporary_folder(self._setup.folder, os.getpid())
            os.mkdir(folder)
            tempfile.tempdir = os.environ["TMPDIR"] = folder
            limits = (self._setup.max_calls, self._setup.seconds, self._setup.memory)
            serve_episode(far, self._classes, start, progress, limits, folder)
        except BaseException as error:  # noqa: BLE001 - this process must never go on as its parent
            os.write(2, f"grpox: the process of an episode failed: {describe(error)}\n".encode())
        finally:
            os._exit(1)


def _temporary_folder(folder: str, pid: int) -> str:
    """Return the place for temporary files of a process: one that is killed leaves them to its parent."""
    return os.path.join(folder, str(pid))


def _adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end."""
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # before it has made its group
        os.kill(pid, signal.SIGKILL)


def _reason(code: int, status: int) -> str:
    if code == os.CLD_EXITED:
        return f"ended its process with exit code {status}"
    by = ", as the kernel does where memory runs out" if status == signal.SIGKILL else ""
    try:
        name = signal.Signals(status).name
    except ValueError:  # a real-time signal
        name = "real-time"
    return f"lost its process to signal {status} ({name}{by})"


if __name__ == "__main__":
    main()
