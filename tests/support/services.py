"""Servers that all workers of a session share: the first that needs one starts it, the last to leave ends it.

The kernel counts the users: each worker holds a shared lock on a file for as long as it lives, so that a worker
that was killed is no user any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from support.patience import patient
from support.session import locked, session_folder

Facts = dict[str, Any]
"""Facts about a service: `pid`, the leader of its process group, and whatever else its users need, as JSON."""

_used: dict[str, IO[str]] = {}
"""The lock of each service that this worker uses."""


def shared(name: str, start: Callable[[Path], Facts]) -> Facts:
    """Return the facts of the session's one service of this name, which is started if it does not run.

    Args:
        name: of the service.
        start: starts it in a folder of its own, waits until it is ready, and returns its facts. What it starts
            must lead a session of its own (``start_new_session=True``): its whole process group is ended.
    """
    with locked(f"service-{name}") as session:
        folder = session / f"service-{name}"
        folder.mkdir(exist_ok=True)
        facts = _running(folder)
        if facts is None:
            facts = start(folder)
            (folder / "facts.json").write_text(json.dumps(facts))
        if name not in _used:
            _used[name] = (folder / "users").open("w")
            fcntl.flock(_used[name], fcntl.LOCK_SH)
    return facts


def restarted(name: str, facts: Facts) -> None:
    """Tell all workers that the service has been started anew, with these facts, by the test that ended it."""
    with locked(f"service-{name}") as session:
        (session / f"service-{name}" / "facts.json").write_text(json.dumps(facts))


def leave_services() -> None:
    """Leave all services, at the end of this worker's session; those that nobody else uses are ended."""
    for name, users in list(_used.items()):
        with locked(f"service-{name}") as session:
            folder = session / f"service-{name}"
            users.close()
            with (folder / "users").open("w") as alone:
                try:
                    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # others use it
                end_group(_facts(folder)["pid"])
                (folder / "facts.json").unlink()
        del _used[name]


def end_services() -> None:
    """End every service that is left, when all workers have ended: one that was killed has left none."""
    for file in session_folder().glob("service-*/facts.json"):
        end_group(_facts(file.parent)["pid"])


def end_group(pid: int, seconds: float = 30) -> None:
    """End a process group as Ctrl-C does, and what is left of it after so many seconds for good."""
    everyone = [each for each in psutil.process_iter() if _group(each.pid) == pid]
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGINT)
    left = running_after(everyone, patient(seconds))
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    running_after(left, patient(seconds))


def running_after(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all have ended, at most so many seconds, and return those that have not.

    One that another worker has started and not waited for has ended too: it stays as a zombie.
    """
    deadline = time.monotonic() + seconds
    while (left := [each for each in processes if is_running(each.pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_until(true: Callable[[], bool], what: str, seconds: float = 180, process: Any = None) -> None:
    """Wait until `true()`; AssertionError with `what` if it never is, or `process` (a Popen) has ended."""
    deadline = time.monotonic() + patient(seconds)
    while not true():
        assert process is None or process.poll() is None, f"{what}: its process has ended"
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s of a quiet machine"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return False also for a process that has ended and whose exit code nobody has read yet."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _running(folder: Path) -> Facts | None:
    facts = _facts(folder)
    return facts if facts and is_running(facts["pid"]) else None


def _facts(folder: Path) -> Facts:
    file = folder / "facts.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _group(pid: int) -> int:
    with suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return -1
