"""A signal that Python swallows still ends the run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.patience import patient

PROGRAM = """
import os, signal, sys
from grpox.cli.errors import run_command
from grpox.runtime.signals import raise_if_signalled

class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), {number})
        for _ in range(1000):  # the handler runs between two instructions of this loop
            pass

def command(arguments):
    raise_if_signalled()
    thing = Swallowing()
    del thing
    print("swallowed", flush=True)
    raise_if_signalled()
    print("not reached", flush=True)

sys.exit(run_command(command, []))
"""


TWICE = """
import os, signal, time
from grpox.runtime import signals
signals.install_handlers()
try:
    with signals.first_signal_waits():
        os.kill(os.getpid(), 15)
        os.kill(os.getpid(), 15)
        print("goes on", flush=True)
        time.sleep(1.1)
        os.kill(os.getpid(), 15)
        print("not reached", flush=True)
except signals.Terminated:
    print("ends")
"""


def outcome(program: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("number", "code"), [(15, 143), (2, 130)])
def test_a_signal_swallowed_by_a_destructor_is_raised_at_the_next_safe_point(number: int, code: int) -> None:
    returned, output, errors = outcome(PROGRAM.format(number=number))
    assert (returned, output) == (code, "swallowed\n")
    assert "Exception ignored" in errors


def test_a_signal_that_was_ignored_from_the_start_stays_so() -> None:
    ignoring = "import signal; signal.signal(2, signal.SIG_IGN)\n"
    assert outcome(ignoring + PROGRAM.format(number=2))[:2] == (0, "swallowed\nnot reached\n")


def test_a_signal_that_a_launcher_passes_on_twice_is_one_signal() -> None:
    assert outcome(TWICE)[:2] == (0, "goes on\nends\n")
