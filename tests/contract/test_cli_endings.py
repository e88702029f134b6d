"""Endings of a command: early signals, closed output, exceptions that typer would swallow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.patience import patient

MAIN = """
import sys
{first}
sys.argv = ["grpox", {words}]
from grpox.cli import main
main()
"""
INTERRUPT = """
import os

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {signal})
            for _ in range(1000):  # the handler runs between two instructions of this loop
                pass

sys.meta_path.insert(0, Interrupt())
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    # Unbuffered output, which some environments ask for, would hide what happens to a buffer.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patient(60), check=False
    )


@pytest.mark.parametrize(
    ("module", "signal", "code"),
    [
        ("typer", 2, 130),
        ("grpox.runfile.load", 2, 130),
        ("grpox.runfile.load", 15, 143),
    ],
)
def test_a_signal_while_importing_is_no_traceback(module: str, signal: int, code: int) -> None:
    interrupt = INTERRUPT.format(module=module, signal=signal)
    done = python(MAIN.format(first=interrupt, words="'validate', 'quickstart'"))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_second_interrupt_while_python_exits_is_no_traceback() -> None:
    interrupt = "import atexit, os; atexit.register(lambda: os.kill(os.getpid(), 2))"
    done = python(MAIN.format(first=interrupt, words="'--version'"))
    assert (done.returncode, done.stderr) == (-2, "")


@pytest.mark.parametrize("command", [["validate", "quickstart"], ["plugins", "list"], ["schema"], ["--help"]])
def test_a_reader_that_goes_away_ends_a_command_as_git_does(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "grpox", *command]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=patient(60), check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_nobody_can_take_is_no_complaint_of_python() -> None:
    done = python(
        "import os, sys\n"
        "from grpox.cli.errors import flush_output\n"
        "reading, writing = os.pipe()\n"
        "os.dup2(writing, 1); os.close(reading)\n"
        "sys.stdout.write('waits in the buffer')\n"
        "flush_output()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("raised", ["EOFError('the engine has gone')", "BrokenPipeError(32, 'worker')"])
def test_what_breaks_elsewhere_is_told_and_not_taken_for_the_terminals(raised: str) -> None:
    first = f"import grpox.runfile.load as load\ndef load_run(*_): raise {raised}\nload.load_run = load_run"
    done = python(MAIN.format(first=first, words="'validate', 'quickstart'"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {raised.partition('(')[0]}: ")


def test_one_rank_prints_discovery_warnings_on_standard_error() -> None:
    def validate(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "grpox", "validate", "quickstart", "plugins.disable=[grpox-mlfow]"]
        return subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )

    first = validate()
    assert (first.returncode, "warning" in first.stdout) == (0, False)
    assert first.stderr.startswith("warning: the plugins.disable list names 'grpox-mlfow'")
    assert validate(RANK="1", WORLD_SIZE="2").stderr == ""
