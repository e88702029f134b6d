"""A long-lived process that judges answers with math-verify and is killed when it takes too long."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from enum import Enum
from pathlib import Path

START_SECONDS = 120.0
"""The process answers after one to three seconds; a machine busy compiling may take much longer."""
WORKER = Path(__file__).with_name("math_worker.py")


class Verdict(Enum):
    """The judgement of one completion; the first three are what the process replies."""

    RIGHT = "right"
    WRONG = "wrong"
    UNREADABLE = "unreadable"
    """The answer itself, not the completion, holds no expression."""
    TIMEOUT = "timeout"
    CRASH = "crash"


class MathProcess:
    """Starts the judging process when it is first needed and again after each one that was killed.

    It is an interpreter of its own rather than a multiprocessing child: that needs no importable
    ``__main__``, so it works in notebooks and unguarded scripts, and inherits neither torch nor CUDA.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., MathProcess] | None = None
        # A call that took too long goes on in its thread while the next one asks: replies would be mixed up.
        self._lock = threading.Lock()

    def judge(self, answer: str, completion: str, timeout_seconds: float) -> Verdict:
        """Whether `completion` ends in an expression equal to `answer`.

        Raises:
            RuntimeError: the process cannot be started.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = _start()
                self._finalizer = weakref.finalize(self, _end, self._process)
            verdict = _ask(self._process, answer, completion, timeout_seconds)
            if verdict in (Verdict.TIMEOUT, Verdict.CRASH):
                self.close()
            return verdict

    def close(self) -> None:
        """Ends the process; the next `judge` starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _start() -> subprocess.Popen[str]:
    # Errors go to a file, because a pipe that nobody reads would block the process once it is full.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # -P: run by path, the folder of the file would come first on sys.path, and math.py shadow `math`.
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="ascii",
        )
        if _reply(process, time.monotonic() + START_SECONDS) != "ready":
            _end(process)
            errors.seek(0)
            raise RuntimeError(f"the math-verify process did not start: {errors.read()[-2000:].strip()}")
    return process


def _ask(process: subprocess.Popen[str], answer: str, completion: str, timeout_seconds: float) -> Verdict:
    assert process.stdin is not None  # given by Popen(stdin=PIPE)
    request = json.dumps({"answer": answer, "completion": completion, "seconds": timeout_seconds})
    deadline = time.monotonic() + timeout_seconds
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return Verdict.CRASH
    reply = _reply(process, deadline)
    if reply is None:
        return Verdict.TIMEOUT
    return Verdict(reply) if reply else Verdict.CRASH


def _reply(process: subprocess.Popen[str], deadline: float) -> str | None:
    """The next line; "" when the process has ended, None when the deadline passes first."""
    assert process.stdout is not None  # given by Popen(stdout=PIPE)
    # poll, not select, which fails on file descriptors above 1023.
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return None
    return process.stdout.readline().strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a request that the process never read
                pipe.close()
