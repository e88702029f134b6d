"""Writes files whole or not at all, and describes write errors, including a full disk.

Other users of the machine may read a run's files at most.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from grpox.errors import text_of
from grpox.errors.formatting import format_bytes


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write, which is renamed to `path` when the block ends.

    Raises:
        OSError: the file cannot be written. An old file stays, and nothing of the new one remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    if unfinished.is_symlink():  # nothing is written through a link
        unfinished.unlink()
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`.

    Raises:
        OSError: the file cannot be written; unlike Python's own error it names `path`.
    """
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def as_strict_json(value: Any) -> str:
    """Write plain values as JSON that every parser reads: NaN and infinity become texts such as ``"nan"``."""
    return json.dumps(without_nan(value), indent=2, allow_nan=False)


def without_nan(value: Any) -> Any:
    """Return plain values with NaN and infinity as texts, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {name: without_nan(each) for name, each in value.items()}
    return [without_nan(each) for each in value] if isinstance(value, list | tuple) else value


MOST_BYTES = 64 << 20
"""Size of a file that `read_small` reads."""
DEEPEST = 64
"""Levels of lists and mappings in JSON that `parse_json` reads."""


def open_regular(path: Path, mode: str = "rb") -> BinaryIO:
    """Open a file of a run, which others may have written; a pipe is never waited for.

    Raises:
        OSError: it is no regular file, or is written through a link.
    """

    def opener(name: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes and os.path.islink(name):
            raise OSError(errno.ELOOP, "is a link, through which nothing is written", name)
        return os.open(name, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666)

    file: BinaryIO = open(path, mode, buffering=0 if "a" in mode else -1, opener=opener)  # type: ignore[assignment]  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return file


def read_small(path: Path) -> str:
    """Read a text of a run; raises OSError, also beyond `MOST_BYTES`, or ValueError for what is no UTF-8."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"has more than {format_bytes(MOST_BYTES)}", str(path))
    return data.decode()


def parse_json(text: str, constant: Callable[[str], Any] = float) -> Any:
    """Parse JSON from outside.

    Raises:
        ValueError: it is none, nests deeper than `DEEPEST`, or has a number beyond those of float64.
    """

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"has the number {text[:20]}, beyond those of float64")
        return value if set(text) & set(".eE") else int(text)

    try:
        value = json.loads(text, parse_constant=constant, parse_float=number, parse_int=number)
        if not _is_deeper(value, DEEPEST):
            return value
    except RecursionError:
        pass
    raise ValueError(f"nests deeper than {DEEPEST} levels")


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(part, levels - 1) for part in parts)


def read_mapping(path: Path, constant: Callable[[str], Any] = float) -> dict[str, Any]:
    """Read the mapping in a file of JSON; empty if the file cannot be read or holds none.

    Args:
        constant: reads ``NaN`` and ``Infinity``, which are no JSON.
    """
    try:
        content = parse_json(read_small(path), constant)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def readable(path: Path | str) -> str:
    r"""Return a path as text that can be encoded: bytes that are not UTF-8 become ``\xff``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def write_error_message(error: Exception, path: Path, needed: int | None = None) -> str:
    """Describe why `path` could not be written, and the free space.

    Args:
        error: exception of the writing library; some libraries wrap the system's reason in their own text.
        needed: needed bytes, if known.
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
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename a complete folder to its final name; an existing folder is moved to ``earlier/``."""
    if folder.exists():
        # The existing folder may contain an earlier model, this run's base model or other user files.
        aside = folder.parent / "earlier" / f"{folder.name}-{time.time_ns()}"
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)
    unfinished.rename(folder)


def restrict_umask() -> None:
    """Prevent other users from writing files and folders that this process creates, for any umask."""
    os.umask(os.umask(stat.S_IRWXG | stat.S_IRWXO) | stat.S_IWGRP | stat.S_IWOTH)
