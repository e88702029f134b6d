"""The program that forks a process for each episode of a rank.

Started as ``python -m grpox.rollout.episodes.forker``. It imports the environments once, without torch, and
forks a process for each connection that the trainer hands to it. The trainer then talks to the process itself;
this program kills it when it is asked to, and reports its end. Each process leads a group of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

from grpox.errors import ConfigError, Problem, describe
from grpox.rollout.episodes.episode_process import serve_episode
from grpox.rollout.episodes.loading import EnvironmentClass, load_environments
from grpox.runtime.workers import END_SECONDS, end_text, end_with, serving_parent

ORDER = struct.Struct("!cI")
"""An order of the trainer: what to do, and number of the process."""
FORK, END, KILL = b"f", b"e", b"k"
"""Orders: fork a process; report the end of one, which has a moment for it; kill one and report its end."""
LAST_SECONDS = 1.0
"""Seconds in which all processes are killed at the end."""
LOOK_SECONDS = 0.1
"""Seconds between two searches for processes that have ended."""
SWEEP_SECONDS = 1.0
"""Seconds between two searches for processes that left the group of an episode that has ended."""
_LIBC, _SUBREAPER = ctypes.CDLL(None), 36  # PR_SET_CHILD_SUBREAPER


def main() -> None:
    """Load the environments, tell the trainer how that went, and serve."""
    with serving_parent() as trainer:
        environments, tools, sys.path[:], limits, folder = pickle.loads(trainer.recv_bytes())
        classes: list[EnvironmentClass] = []
        problems: Sequence[Problem] = ()
        try:
            classes = load_environments(environments, tools)
        except ConfigError as error:
            problems = error.problems
        except BaseException as error:  # noqa: BLE001 - whatever the user's module raises is reported
            problems = [Problem(f"the environments cannot be loaded: {describe(error)}", "environment")]
        trainer.send_bytes(pickle.dumps(tuple(problems)))
        if not problems:
            _Forker(trainer, classes, limits, folder).run()
    os.killpg(0, signal.SIGKILL)  # with what the environments' modules have started


class _Forker:
    """Forks processes, kills them and notes their ends.

    Args:
        limits: of each process: most calls of a turn, seconds of a call, GiB of memory.
        folder: folder of the temporary folders of the processes, each named by its process.
    """

    def __init__(
        self,
        trainer: Connection,
        classes: Sequence[EnvironmentClass],
        limits: tuple[int, float, float],
        folder: str,
    ) -> None:
        self._trainer, self._classes, self._limits, self._folder = trainer, classes, limits, folder
        self._orders = socket.socket(fileno=os.dup(trainer.fileno()))
        self._pids: dict[int, int] = {}
        """Number -> pid of the processes of episodes."""
        self._reasons: dict[int, str] = {}
        """Number -> reason of the end, for processes of whose ends the trainer has not asked yet."""
        self._of_modules = {each.pid for each in psutil.Process().children()}
        """Processes that the environments' modules started as they were imported."""
        self._swept = 0.0
        self._needs_sweep = False
        _adopt_orphans()
        gc.collect()
        gc.freeze()  # a collection in a process would copy the pages that it shares with this one

    def run(self) -> None:
        """Obey until the trainer has closed its connection, then kill everything."""
        poller = select.poll()
        poller.register(self._orders, select.POLLIN)
        goes_on = True
        while goes_on:
            if poller.poll(1000 * LOOK_SECONDS if self._pids or self._needs_sweep else None):
                goes_on = self._obey()
            self._reap()
            if self._needs_sweep and time.monotonic() > self._swept + SWEEP_SECONDS:
                self._sweep({*self._pids.values(), *self._of_modules})
        deadline = time.monotonic() + LAST_SECONDS
        for pid in self._pids.values():
            _kill_group(pid)
        while self._sweep(set()) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)

    def _obey(self) -> bool:
        """Follow one order; return False if there will be no more."""
        message, files, _, _ = socket.recv_fds(self._orders, ORDER.size, 1)
        if not message:
            return False
        order, number = ORDER.unpack(message)
        if order == FORK:
            self._fork(number, Connection(files[0]))
        else:
            self._trainer.send_bytes(self._end(number, order == KILL).encode())
        return True

    def _end(self, number: int, is_killed: bool) -> str:
        """Wait for the end of a process, and return the reason."""
        deadline = time.monotonic() + (0.0 if is_killed else END_SECONDS)
        self._reap()
        while number in self._pids:
            if time.monotonic() > deadline:
                self._reasons[number] = "closed its connection"
                _kill_group(self._pids[number])
            time.sleep(0.002)
            self._reap()
        return self._reasons.pop(number, end_text(0))

    def _reap(self) -> None:
        """Note the processes that have ended; a group is killed before its number is free for another."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                for number in [number for number, pid in self._pids.items() if pid == ended.si_pid]:
                    _kill_group(ended.si_pid)
                    shutil.rmtree(f"{self._folder}/{ended.si_pid}", ignore_errors=True)
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    if code:
                        self._reasons.setdefault(number, end_text(code))
                    del self._pids[number]
                    self._needs_sweep = True
                os.waitpid(ended.si_pid, 0)

    def _sweep(self, known: set[int]) -> bool:
        """Kill processes that left the groups of ended episodes; return True if there were any.

        This process has adopted them. The process of an open episode adopts its own.
        """
        strangers = [each for each in psutil.Process().children() if each.pid not in known]
        for stranger in strangers:
            with contextlib.suppress(psutil.Error):
                stranger.kill()
        self._needs_sweep, self._swept = bool(strangers), time.monotonic()  # their children are adopted next
        return self._needs_sweep

    def _fork(self, number: int, connection: Connection) -> None:
        with connection:
            try:
                pid = os.fork()
            except OSError as error:  # no more processes
                self._reasons[number] = f"no process could be started for it: {describe(error)}"
                return
            if pid == 0:
                self._serve(connection)
        with contextlib.suppress(OSError):  # the process itself was first
            os.setpgid(pid, pid)
        self._pids[number] = pid

    def _serve(self, connection: Connection) -> NoReturn:
        """Become the process of an episode."""
        try:
            os.setpgid(0, 0)
            lifeline = int(sys.argv[-1])
            # Opened anew, it has an owner of its own.
            end_with(os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK))
            for file in (lifeline, self._orders.fileno(), self._trainer.fileno()):
                os.closerange(file, file + 1)  # the objects stay: closing them would close others' files later
            _adopt_orphans()
            folder = f"{self._folder}/{os.getpid()}"  # one that is killed leaves its files to this program
            os.mkdir(folder)
            tempfile.tempdir = os.environ["TMPDIR"] = folder
            serve_episode(connection, self._classes, self._limits, folder)
        except BaseException as error:  # noqa: BLE001 - this process must never go on as its parent
            os.write(2, f"grpox: the process of an episode failed: {describe(error)}\n".encode())
        finally:
            os._exit(1)


def _adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end."""
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # before it has made its group
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
