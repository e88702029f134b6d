"""One session of tests: the folder that all its workers share, and the locks there."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "GRPOX_TESTS_SESSION"


def session_folder() -> Path:
    """The folder that all workers of this session share. The first process that asks makes it, and owns it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="grpox-tests-")
    return Path(os.environ[VARIABLE])


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """Alone among the workers of this session for as long as the context lasts; yields the session's folder."""
    folder = session_folder()
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder
