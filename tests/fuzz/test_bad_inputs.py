"""Every bad input ends in a clear error: exit code 2, the key or file and what was given, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from fuzz_case import Case, Outcome, complaints, in_process
from fuzz_corpus import all_cases

CASES = all_cases()
AS_A_PROCESS = (
    "YAML: an alias bomb",
    "YAML: a python object",
    "text: a loss with colours",
    "path: data that is a FIFO",
    "run: a name that is no UTF-8",
    "override: a..b=1",
)
GIVEN_UP_AFTER = 120
"""Seconds, on a machine however slow, after which a command that does not end fails its test."""


@contextmanager
def patience() -> Iterator[None]:
    """Interrupts what hangs: an input must not be waited for without end."""

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer after {GIVEN_UP_AFTER} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(GIVEN_UP_AFTER)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_there_are_enough_cases_and_each_is_another_one() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 300


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_answered_by_a_clear_error(case: Case, case_folder: Path) -> None:
    case.make(case_folder)
    with patience():
        outcome = in_process(case.arguments)
    assert complaints(case, outcome) == [], outcome.stderr
    assert not (case_folder / "pwned").exists()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in AS_A_PROCESS], ids=lambda case: case.name
)
def test_the_command_itself_answers_as_its_function_does(case: Case, case_folder: Path) -> None:
    case.make(case_folder)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("grpox")), *map(os.fsencode, case.arguments)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=GIVEN_UP_AFTER,
        check=False,
    )
    outcome = Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert complaints(case, outcome) == []
