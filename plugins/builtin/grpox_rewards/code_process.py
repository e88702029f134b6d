"""Judges one completion in a fresh process, which is killed with all it started when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
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
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
"""All of it: no secret of the trainer's; and sets in the same order in every run."""


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


def run_tests(code: str, tests: list[str], limits: Limits) -> Judgement:
    """Which of `tests` pass on what `code` defines."""
    made = _judged(code, False, {"tests": tests}, limits)
    passed = made.get("passed", [False] * len(tests))
    return Judgement(passed, None, made.get("late", False), tuple(made.get("lacking", ())))


def run_program(code: str, text: str, limits: Limits) -> Judgement:
    """What the program `code` writes when it is given `text`."""
    made = _judged(code, True, {"input": text}, limits)
    return Judgement([], made.get("output"), made.get("late", False), tuple(made.get("lacking", ())))


def _judged(code: str, program: bool, tests: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """What the judging process said, as it has it; nothing but that it is late where it had to be killed.

    Raises:
        RuntimeError: it failed by itself, which no completion can bring about.
    """
    with tempfile.TemporaryDirectory(prefix="grpox-code-", ignore_cleanup_errors=True) as folder:
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
    if not told:
        reason = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"code {process.returncode}"]
        raise RuntimeError(f"the process that judges code failed: {reason[0]}")
    made: dict[str, Any] = json.loads(told)
    return made


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("=I", len(data)) + data
