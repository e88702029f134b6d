"""Files that appear whole or not at all, and the message for one that does not fit on its disk.

Other users of the machine may at most read the files of a run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpox.errors import text_of
from grpox.errors.formatting import format_bytes


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the file to write: it is renamed to `path` when the block ends.

    Raises:
        OSError: it cannot be written. What was there before stays, and nothing of the new one is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write `text`.

    Raises:
        OSError: with the name of `path`, which an error of writing lacks by itself.
    """
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a file of JSON; empty if the file cannot be read or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_error_message(error: Exception, path: Path, needed: int | None = None) -> str:
    """Say why `path` could not be written, and how much room there is.

    Args:
        error: what the library that wrote it raised; some hide the system's reason in their own words.
        needed: bytes, where known.
    """
    reason = getattr(error, "strerror", None) or text_of(error)
    hidden = re.search(r"I/O error: (.*) \(os error \d+\)|Detail: \[errno \d+\] (.*)", reason)
    if hidden:
        reason = hidden[1] or hidden[2]
    room = ""
    with suppress(OSError):
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        room = f" ({format_bytes(shutil.disk_usage(there).free)} free"
        room += f", about {format_bytes(needed)} needed)" if needed is not None else ")"
    return f"{path} cannot be written: {' '.join(reason.split())}{room}"


def sync(path: Path) -> None:
    """Have the kernel write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Give a folder that is whole its name; what stood there is moved to ``earlier/``."""
    if folder.exists():
        # It may hold an earlier model, the base of this run or anything else of the user's: keep it.
        aside = folder.parent / "earlier" / f"{folder.name}-{time.time_ns()}"
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)
    unfinished.rename(folder)


def restrict_umask() -> None:
    """Deny others to write files and folders that this process makes from now on, whatever its umask was."""
    os.umask(os.umask(stat.S_IRWXG | stat.S_IRWXO) | stat.S_IWGRP | stat.S_IWOTH)
