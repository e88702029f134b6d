"""A rank that stalls says so and ends the run in the end; a machine that is gone without a word is noticed.

Each rank watches itself: of those that stand still together, the one that is in no phase of waiting is the
one they all wait for. Other machines are probed by the kernel. A process that ends closes its connections,
and whoever waits for it is told. A machine that loses power or its network closes nothing: TCP gives up after
a quarter of an hour at best, and never where nothing is under way. gloo sets no limit of its own, but fails
at once where a connection does.
"""

from __future__ import annotations

import faulthandler
import ipaddress
import os
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from grpox.config import WatchdogConfig
from grpox.errors import RunFailed
from grpox.runtime.phases import WAITING, PhaseTimes

PROBES = 4
"""Unanswered, one after the other, before the connection is lost."""
GRACE = 60.0
"""Seconds that a rank has to end in order; and that those who wait for it wait longer than it may stall."""
INTERRUPT = signal.SIGUSR2
"""Ends a wait of the main thread in Python. SIGUSR1 is left to batch systems, which announce an end by it."""


class Watchdog:
    """Watches the phases of this rank from a thread, within a with-block of the main thread.

    After `tell_after` seconds without a sign of life a warning names rank and phase, and the stacks of all
    threads are written. After `end_after` seconds the main thread is interrupted by RunFailed; if that shows no
    effect, as in a library that never returns, the process is ended with exit code 1. Where not even this
    thread can run, because a library holds Python's lock, faulthandler writes the stacks and ends the process.
    """

    def __init__(self, config: WatchdogConfig, times: PhaseTimes, folder: Path, rank: int) -> None:
        """
        Args:
            folder: where the stacks are written; made when they are.
        """
        self._config = config
        self._times = times
        self._path = folder / f"rank-{rank:05d}.txt"
        self._rank = rank
        self._ended = threading.Event()
        self._warned_of = self._interrupted = 0.0
        self._failure = ""
        self._thread = threading.Thread(target=self._watch, name="grpox-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._watches_main = threading.current_thread() is threading.main_thread()
        if self._watches_main:
            self._handler_before = signal.signal(INTERRUPT, self._interrupt)
        self._file: IO[str] | None = None
        self._arm()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(GRACE)
        faulthandler.cancel_dump_traceback_later()
        if self._watches_main:
            signal.signal(INTERRUPT, self._handler_before)
        if self._file is not None:
            self._file.close()

    def _watch(self) -> None:
        every = min(1.0, self._config.tell_after / 5)
        while not self._ended.wait(every):
            # Where memory has run out, of which the run tells, there may be none for a look or for the thread
            # that arming starts: the next look tries again.
            with suppress(MemoryError, RuntimeError):
                self._look(time.perf_counter())
                self._arm()

    def _arm(self) -> None:
        """Have the process ended if this thread does not come to do so again."""
        longest = self._config.end_after + 3 * GRACE
        faulthandler.dump_traceback_later(longest, exit=True, file=self._file or 2)

    def _look(self, now: float) -> None:
        phase, since = self._times.now()
        seconds = now - since
        limit = self._config.end_after + (GRACE if phase == WAITING else 0)
        if seconds > self._config.tell_after and self._warned_of != since:
            self._warned_of = since
            self._tell("warning", self._dumped(phase, seconds))
        if seconds > limit and self._interrupted != since:
            self._interrupted = since
            self._failure = self._dumped(phase, seconds)
            if self._watches_main:
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
        elif seconds > limit + GRACE:
            self._tell("error", f"{self._failure}; it does not react, and is ended")
            os._exit(1)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> Any:
        raise RunFailed(self._failure or f"rank {self._rank} was told to end by {INTERRUPT.name}")

    def _dumped(self, phase: str, seconds: float) -> str:
        """Write the stacks to the file; return the message about the stall."""
        doing = "waiting for the other ranks" if phase == WAITING else f"in phase '{phase}'"
        message = f"rank {self._rank} has been {doing} for {seconds:.0f} s"
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            print(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=self._file, flush=True)
            faulthandler.dump_traceback(self._file)
        except OSError as error:
            return f"{message}; its stacks could not be written: {error}"
        return f"{message}; the stacks of its threads are in {self._path}"

    def _tell(self, kind: str, text: str) -> None:
        # Not by print: the thread that stalls may hold the lock of standard error.
        os.write(2, f"{kind}: {text}\n".encode())


def enable_tcp_keepalive(seconds: float) -> int:
    """End every TCP connection of this process to another machine once that machine is silent for so long.

    The kernel's answers count, not those of the process there: one that computes or stalls is not silent. On
    other systems than Linux this does nothing.

    Returns:
        the number of such connections.
    """
    if not sys.platform.startswith("linux"):
        return 0
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # one that was closed meanwhile, or listens and has no peer
            if stat.S_ISSOCK(Path(f"/proc/self/fd/{name}").stat().st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    count += _lose_if_silent(connection, seconds)
    return count


def _lose_if_silent(connection: socket.socket, seconds: float) -> bool:
    """Set the limits if the connection leads to another machine; return True if it does."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    peer = ipaddress.ip_address(str(connection.getpeername()[0]).partition("%")[0])
    if (getattr(peer, "ipv4_mapped", None) or peer).is_loopback:
        return False
    between = max(1, round(seconds / (PROBES + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", between), ("TCP_KEEPINTVL", between), ("TCP_KEEPCNT", PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # What was sent and not acknowledged is not probed for: it has a limit of its own.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))
    return True
