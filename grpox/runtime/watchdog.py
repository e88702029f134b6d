"""Reports stalled ranks, ends the run after a time limit, and detects lost machines.

Each rank watches itself. If several ranks stand still, all of them wait for the one that is not in a waiting
phase. The kernel probes other machines: a process that ends closes its connections, so its peers get an error,
but a machine that loses power or network closes nothing. TCP alone gives up after a quarter of an hour at best,
and never on an idle connection. gloo has no time limit, but fails at once when a connection fails.
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
"""Number of consecutive unanswered probes after which the connection counts as lost."""
GRACE = 60.0
"""Seconds that a rank has for an orderly end; ranks that wait for it wait this much longer."""
INTERRUPT = signal.SIGUSR2
"""Signal that ends a wait of the main thread. Batch systems use SIGUSR1 to announce the end of a job."""


class Watchdog:
    """Watches the phases of this rank from a thread, within a with-block of the main thread.

    After `tell_after` seconds without progress, a warning names rank and phase, and the stacks of all threads
    are written. After `end_after` seconds RunFailed interrupts the main thread; if that has no effect, for
    example in a library that never returns, the process ends with exit code 1. If a library holds Python's
    lock, so that this thread cannot run either, faulthandler writes the stacks and ends the process.
    """

    def __init__(self, config: WatchdogConfig, times: PhaseTimes, folder: Path, rank: int) -> None:
        """
        Args:
            folder: folder for the stacks; created when they are written.
        """
        self._config = config
        self._times = times
        self._path = folder / f"rank-{rank:05d}.txt"
        self._rank = rank
        self._ended = threading.Event()
        self._warned_of = self._interrupted = 0.0
        self._failure = ""
        self._paused = False
        self._paused_at = 0.0
        self.paused_for = 0.0
        """Seconds of the last pause."""
        self._looking = threading.Lock()
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

    def pause(self) -> None:
        """Watch nothing until `resume`: the run waits for its caller, for as long as that takes."""
        with self._looking:
            self._paused, self._paused_at = True, time.perf_counter()
            faulthandler.cancel_dump_traceback_later()

    def resume(self) -> None:
        """Watch again, from this moment on."""
        with self._looking:
            self._times.touch()
            self._paused, self.paused_for = False, time.perf_counter() - self._paused_at
            self._arm()

    def _watch(self) -> None:
        every = min(self._config.tell_after, self._config.end_after, GRACE) / 5
        while not self._ended.wait(every):
            # If memory has run out, which the run reports, this check or the thread that it starts may lack
            # memory too: the next check tries again.
            with suppress(MemoryError, RuntimeError), self._looking:
                if not self._paused:
                    self._look(time.perf_counter())
                    self._arm()

    def _arm(self) -> None:
        """Schedule the end of the process, unless this thread reschedules it in time."""
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
            self._tell("error", f"{self._failure}; the process does not react and is ended")
            os._exit(1)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> Any:
        raise RunFailed(self._failure or f"rank {self._rank} was ended by {INTERRUPT.name}")

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
        # Not by print: the stalled thread may hold the lock of standard error.
        os.write(2, f"{kind}: {text}\n".encode())


def enable_tcp_keepalive(seconds: float) -> int:
    """Make every TCP connection of this process to another machine fail after that many seconds of silence.

    Replies of the other machine's kernel count, so a process that computes or stalls is not silent. Works only
    on Linux; elsewhere this does nothing.

    Returns:
        the number of changed connections.
    """
    if not sys.platform.startswith("linux"):
        return 0
    count, between = 0, max(1, round(seconds / (PROBES + 1)))
    limits = {
        socket.TCP_KEEPIDLE: between,
        socket.TCP_KEEPINTVL: between,
        socket.TCP_KEEPCNT: PROBES,
        # TCP sends no probes while data is unacknowledged; such data has its own limit.
        socket.TCP_USER_TIMEOUT: max(1000, round(seconds * 1000)),
    }
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # a socket that was closed meanwhile, or listens and has no peer
            if not stat.S_ISSOCK(Path(f"/proc/self/fd/{name}").stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
                if not is_ip or connection.type != socket.SOCK_STREAM:
                    continue
                peer = ipaddress.ip_address(str(connection.getpeername()[0]).partition("%")[0])
                if (getattr(peer, "ipv4_mapped", None) or peer).is_loopback:
                    continue
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in limits.items():
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                count += 1
    return count
