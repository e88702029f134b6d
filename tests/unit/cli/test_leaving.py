"""A command's process ends after its exit functions and threads, without the interpreter's finalization."""

from __future__ import annotations

import subprocess
import sys

from support.patience import patient

PROGRAM = """
import atexit, threading, time
{world}
from grpox.cli.errors import leave

class Left:
    def __del__(self):
        print("finalized")

def late():
    time.sleep(0.3)
    print("thread")

left = Left()
atexit.register(print, "exit function")
threading.Thread(target=late).start()
leave(3)
"""


def told(world: str) -> tuple[int, list[str], str]:
    command = [sys.executable, "-c", PROGRAM.format(world=world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


def test_a_process_with_a_process_group_skips_finalization() -> None:
    assert told("import grpox.runtime.world") == (3, ["thread", "exit function"], "")


def test_elsewhere_the_process_ends_as_any_other() -> None:
    assert told("") == (3, ["thread", "exit function", "finalized"], "")
