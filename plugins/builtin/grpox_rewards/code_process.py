"""Judges one completion in a fresh process, which is killed with all it started when it takes too long."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.runtime.child import Child, ChildFailed, ChildLate

JUDGE = Path(__file__).with_name("code_judge.py")
GRACE_SECONDS = 5.0
"""For the start of the interpreter, beyond the code's own time; ten times what it takes."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}
"""All of it: no secret of the trainer's; sets in the same order in every run; and no module that the code has
left in its folder, for a Python that a test starts there."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Limits:
    """What one process may use."""

    seconds: float
    memory: int
    """Bytes of address space."""


@dataclass(frozen=True)
class Judgement:
    """What became of the code; where its process was killed, nothing passed and it was late."""

    passed: list[bool]
    """Of each test."""
    output: str | None = None
    """Of a program; None where it failed."""
    late: bool = False
    lacking: tuple[str, ...] = ()
    """What the kernel did not let be taken from it: ``network``, ``files``."""
    crash: str = ""
    """Why the judging process ended without a verdict: nothing passed."""


def run_tests(code: str, tests: list[str], limits: Limits) -> Judgement:
    """Return which of `tests` pass on what `code` defines."""
    made = _judged(code, False, {"tests": tests}, limits)
    return Judgement(**{"passed": [False] * len(tests), **made})


def run_program(code: str, text: str, limits: Limits) -> Judgement:
    """Return what the program `code` writes when it is given `text`."""
    return Judgement(**{"passed": [], **_judged(code, True, {"input": text}, limits)})


def _judged(code: str, program: bool, tests: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return what the judging process said, as fields of a `Judgement`, and why it said no more."""
    made: dict[str, Any] = {}
    folder = tempfile.mkdtemp(prefix="grpox-code-")
    try:
        about = {"code": code, "program": program, "folder": folder}
        deadline = time.monotonic() + limits.seconds + GRACE_SECONDS
        # Without site-packages, the user's and the environment's own settings: the same everywhere.
        command = ["-s", "-S", "-P", str(JUDGE), str(JUDGE.parents[1])]
        stall = limits.seconds + GRACE_SECONDS
        child = Child(command, stall, environment=ENVIRONMENT, folder=folder)
        try:
            for message in ({**about, "seconds": limits.seconds, "memory": limits.memory}, tests):
                child.send(json.dumps(message).encode())
            for _ in range(2):  # about the confinement, and the verdict
                made |= json.loads(child.receive(deadline))
        except ChildLate:
            return {"late": True}
        except ChildFailed:
            status = child.end()
            made["crash"] = child.printed.rpartition("\n")[2] or f"it ended with code {status}"
        finally:
            child.kill()
    finally:
        remove_folder(folder)
    return {**made, "lacking": tuple(made.get("lacking", ()))}


def remove_folder(folder: str) -> None:
    """Remove a folder with all that code has left in it, as far as the disk lets.

    Folders may be unreadable, and nested too deep for a path or for recursion: what a folder holds is moved to
    the top, under a new name, before the folder goes. Nothing outside is touched: no link is followed.
    """
    with contextlib.suppress(OSError):
        top = os.open(folder, FOLDER)
        try:
            prefix, numbers = secrets.token_hex(), itertools.count()
            while names := os.listdir(top):
                for name in names:
                    if not _is_opened_up(name, top):
                        os.unlink(name, dir_fd=top)
                        continue
                    inside = os.open(name, FOLDER, dir_fd=top)
                    try:
                        for inner in os.listdir(inside):
                            _is_opened_up(inner, inside)  # only a folder that may be written can be moved
                            os.rename(inner, f"{prefix}{next(numbers)}", src_dir_fd=inside, dst_dir_fd=top)
                    finally:
                        os.close(inside)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _is_opened_up(name: str, parent: int) -> bool:
    """Return whether it is a folder; if so, let it be read and written."""
    try:
        handle = os.open(name, FOLDER | os.O_PATH, dir_fd=parent)
    except NotADirectoryError:
        return False
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
    return True
