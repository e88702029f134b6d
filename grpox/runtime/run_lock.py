"""One process at a time writes into a run's folder: the run itself, or a later report of it to MLflow.

The kernel's lock decides. It goes with the process that took it, however that ends: a process that it forks
gives up its copy, and a program that it starts gets none. The text in the file only names who took it. On a
file system without locks a file stands for one, until no process of that host, number and start time is left.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    from grpox.runtime.world import World

LOCKED, MARKER = "run.lock", "run.pid"
"""The file whose lock is held; the file that stands for a lock where there are none."""
PATIENCE = 2.0
"""Seconds that a process which was just killed has to go."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def hold(folder: Path, key: str = "") -> Iterator[None]:
    """Hold a run's folder within the block; it is made where it is missing.

    Args:
        key: what names it, for the message.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
    """
    folder = folder.absolute()
    try:
        new = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
    except Timeout as error:
        what = f"is in use by {_holder(Path(error.lock_file))}"
        allowed = "a folder that no process writes into: wait until that one has ended, or end it"
        if Path(error.lock_file).name == MARKER:
            allowed += f"; if it is gone, with its machine too, remove {error.lock_file}"
        raise ConfigError(what, key, given=str(folder), allowed=allowed) from error
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise ConfigError(what, key, given=str(error.filename or folder)) from error
    try:
        yield
    finally:
        if lock.is_locked:  # not in a process that was forked meanwhile
            # Before it is released: whoever gets hold of the old file then sees that it is gone.
            (folder / LOCKED).unlink(missing_ok=True)
            lock.release()
            with suppress(OSError):  # a folder in which something has been written stays
                for place in new:
                    place.rmdir()


@contextmanager
def hold_on_all_ranks(folder: Path, world: World) -> Iterator[None]:
    """Hold a run's folder, on rank 0 for all of them; a collective. Raises ConfigError as `hold`, on all."""
    with ExitStack() as stack:
        problems: list[Problem] = []
        if world.is_main:
            try:
                stack.enter_context(hold(folder, "output_dir"))
            except ConfigError as error:
                problems = error.problems
        if problems := world.gather(problems):
            raise ConfigError(problems)
        yield


def _locked(folder: Path) -> BaseFileLock:
    """The lock, taken; raises Timeout where another process has it."""
    lock: BaseFileLock = FileLock(
        folder / LOCKED, PATIENCE, thread_local=False, fallback_to_soft=False, on_acquired=_sign
    )
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        (folder / LOCKED).unlink(missing_ok=True)
        lock = SoftFileLock(folder / MARKER, PATIENCE, thread_local=False)
        lock.acquire()
    return lock


def _sign(descriptor: int) -> None:
    """Say who holds the lock, in the form that the marker has."""
    with suppress(OSError):  # on a full disk it holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)


def _holder(path: Path) -> str:
    """``process 123 on host``, as far as the file tells."""
    try:
        pid, host, *_ = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return "another process"
    return f"process {pid} on {host}"
