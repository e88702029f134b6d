"""Judges one completion in a fresh process, which is killed with all it started when it takes too long."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    folder = tempfile.mkdtemp(prefix="grpox-code-")
    try:
        about = {"code": code, "program": program, "folder": folder}
        message = _framed({**about, "seconds": limits.seconds, "memory": limits.memory}) + _framed(tests)
        # Without site-packages, the user's and the environment's own settings: the same everywhere.
        command = [sys.executable, "-s", "-S", "-P", str(JUDGE), str(JUDGE.parents[1])]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=folder,
            start_new_session=True,
        )
        try:
            told, errors = process.communicate(message, limits.seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"late": True}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    finally:
        remove_folder(folder)
    said = [json.loads(line) for line in told.splitlines()]
    made = {name: value for line in said for name, value in line.items()}
    if len(said) < 2:
        reason = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
        made["crash"] = reason[0] if reason else f"it ended with code {process.returncode}"
    return {**made, "lacking": tuple(made.get("lacking", ()))}


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("=I", len(data)) + data


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
