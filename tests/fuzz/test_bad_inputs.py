"""Every bad input ends in a clear error: exit code 2, the key or file and what was given, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_case import HANGS_AFTER, Case, complaints, given_up_when_it_hangs
from fuzz_corpus import all_cases
from support.handlers import Ended, invoke
from support.patience import patient

CASES = all_cases()
AS_A_PROCESS = (
    "YAML: an alias bomb",
    "YAML: a python object",
    "text: a loss with colours",
    "path: data that is a FIFO",
    "run: a name that is no UTF-8",
    "override: a..b=1",
)


def test_there_are_enough_cases_and_each_is_another_one() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 900


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_answered_by_a_clear_error(case: Case, case_folder: Path) -> None:
    case.make(case_folder)
    with given_up_when_it_hangs():
        outcome = invoke(case.arguments)
    assert complaints(case, outcome) == [], outcome.errors
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
        timeout=patient(HANGS_AFTER),
        check=False,
    )
    outcome = Ended(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert complaints(case, outcome) == []
