"""Locks a run's folder, so that only one process writes into it: the run, or a later sync to MLflow.

The kernel's file lock decides. It ends with the process that owns it: a forked process gives up its copy, and a
started program gets none. The text in the file only names the owner. On a file system without locks, a file
replaces the lock until no process with its host, number and start time exists.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from grpox.errors import ConfigError, Problem
from grpox.runtime.files import open_regular, read_small

if TYPE_CHECKING:
    from grpox.runtime.world import World

LOCKED, MARKER = "run.lock", "run.pid"
"""Name of the locked file; name of the file that replaces a lock on file systems without locks."""
PATIENCE = 2.0
"""Seconds to wait for the end of a process that was just killed."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def hold(folder: Path, key: str = "") -> Iterator[None]:
    """Lock a run's folder within the block; create the folder if it is missing.

    Args:
        key: key that names the folder, for the message.

    Raises:
        ConfigError: another process has the lock, or the folder cannot be written.
    """
    folder = folder.absolute()
    try:
        new = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
    except Timeout as error:
        owner, path = "another process", Path(error.lock_file)
        with suppress(OSError, ValueError):  # there is no name in it
            pid, host, *_ = read_small(path).splitlines()
            owner = f"process {pid} on {host}"
        allowed = "a folder that no process uses: wait until that process has ended, or end it"
        if path.name == MARKER:
            allowed += f"; if the process no longer exists, for example after a reboot, remove {path}"
        raise ConfigError(f"is in use by {owner}", key, given=str(folder), allowed=allowed) from error
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise ConfigError(what, key, given=str(error.filename or folder)) from error
    try:
        yield
    finally:
        if lock.is_locked:  # not in a process that was forked meanwhile
            # Removed before the release: a process that then locks the old file sees that it is gone.
            (folder / LOCKED).unlink(missing_ok=True)
            lock.release()
            with suppress(OSError):  # a folder in which something has been written stays
                for place in new:
                    place.rmdir()


def is_locked(folder: Path) -> bool:
    """Return True if a process has the lock of a run's folder; changes nothing.

    On a file system without locks, True may also mean that the process was killed.
    """
    if (folder / MARKER).exists():
        return True
    try:
        with open_regular(folder / LOCKED) as file:
            # Shared, so that two readers are no owners to each other; the end of the block releases it.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or none can be asked for here
        return False
    return False


@contextmanager
def hold_on_all_ranks(folder: Path, world: World) -> Iterator[None]:
    """Lock a run's folder on rank 0 for all ranks; a collective. Raises ConfigError like `hold`, on all
    ranks."""
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
    """Return the acquired lock; raises Timeout if another process has it."""
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
    """Write the owner into the lock file, in the marker's format."""
    with suppress(OSError):  # on a full disk it holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
