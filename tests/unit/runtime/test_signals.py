"""A signal that Python swallows still ends the run."""

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


@pytest.mark.parametrize(("number", "code"), [(15, 143), (2, 130)])
def test_a_signal_swallowed_by_a_destructor_is_raised_at_the_next_safe_point(number, code):
    command = [sys.executable, "-c", PROGRAM.format(number=number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.stdout == "swallowed\n"
    assert "Exception ignored" in done.stderr
    assert done.returncode == code


def test_a_signal_that_was_ignored_from_the_start_stays_so():
    program = "import signal; signal.signal(2, signal.SIG_IGN)\n" + PROGRAM.format(number=2)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.stdout == "swallowed\nnot reached\n"
    assert done.returncode == 0


def test_a_signal_that_a_launcher_passes_on_twice_is_one_signal():
    program = """
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
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.stdout == "goes on\nends\n"
