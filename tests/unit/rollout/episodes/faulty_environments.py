"""Environments and tools that go wrong in every way that is known; each runs in a process of its own."""

import asyncio
import collections
import contextlib
import ctypes
import inspect
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from grpox.environments import Appended, Environment, ToolCall, tool


def documented(function):
    """Give a tool the docstring that it needs."""
    lines = [f"    {name}: what." for name in inspect.signature(function).parameters if name != "self"]
    function.__doc__ = "\n".join(["Do it.", "", "Args:", *lines])
    return function


@documented
def add(a: int, b: int = 1) -> int:
    return a + b


@documented
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


class Noted(Environment):
    """Notes its life in a file: o and c for each instance, with its number."""

    class Config(BaseModel):
        file: str

    def __init__(self, config):
        self.file = config.file

    def note(self, letter):
        with open(self.file, "a") as file:
            file.write(f"{letter}{self.number}\n")

    def reset(self, row, seed):
        self.number = row["number"]
        self.note("o")
        return f"start {self.number}"

    def reward(self):
        return float(self.number)

    def info(self):
        return {"number": self.number}

    def close(self):
        self.note("c")

    @tool
    @documented
    def fault(self, kind: str) -> str:
        return FAULTS[kind]()


def raises():
    raise OSError("the disk is full")


def hangs():
    while True:
        time.sleep(0.01)


def hangs_in_spite():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(100)


def hangs_in_c():
    collections.deque(itertools.repeat(0), maxlen=0)  # no handler of a signal runs in it


def prints():
    print("x" * (1 << 20))
    print("y" * (1 << 20), file=sys.stderr)
    return "printed"


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def closes_everything():
    os.closerange(3, 1000)
    return "closed"


def leaves_processes():
    for apart in (False, True):
        subprocess.Popen(["sleep", "1234"], start_new_session=apart)
    return "started"


def counts_workers():
    """Count the processes that are in here at the same time."""
    folder = Path(os.environ["GRPOX_TEST_MEETING"])
    own = folder / f"worker-{os.getpid()}"
    own.touch()
    time.sleep(0.2)
    count = len(list(folder.glob("worker-*")))
    own.unlink()
    return str(count)


def has_a_child_that_exits():
    if (pid := os.fork()) == 0:
        sys.exit(3)
    return str(os.waitpid(pid, 0)[1] >> 8)


def leaves_a_family():
    subprocess.Popen(["sh", "-c", "sleep 1235; true"], start_new_session=True)
    return "started"


def exits_while_its_parent_hangs():
    os.kill(os.getppid(), signal.SIGSTOP)
    sys.exit(3)


def kills_its_parent_and_itself():
    subprocess.Popen(["sleep", "1236"])
    for pid in (os.getppid(), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def makes_a_folder():
    Path(folder := tempfile.mkdtemp(), "file").touch()
    return folder


def makes_a_folder_and_is_killed():
    makes_a_folder()
    is_killed()


FAULTS = {
    **globals(),
    "nothing": lambda: "fine",
    "eats": lambda: len(bytearray(8 << 30)),
    "exits": lambda: sys.exit(3),
    "leaves": lambda: os._exit(4),
    "crashes": lambda: ctypes.string_at(0),
    "forks": lambda: str(os.fork() * 0),
}


class Lake(Environment):
    def reset(self, row, seed):
        self.place = 0
        self.numbers = [random.random(), sorted({"a", "b", "c"}, key=hash)]
        return [{"role": "user", "content": "start"}]

    @tool
    @documented
    def move(self, direction: Literal["left", "right"]) -> dict:
        self.place += 1 if direction == "right" else -1
        self.done = self.place == 2
        return {"place": self.place}

    @tool
    async def look(self) -> None:
        """Look around."""

    def state_key(self):
        return (self.place, frozenset({"x", "y"}))

    async def reward(self):
        return {"goal": self.place, "steps": 0.5}

    def turn_rewards(self):
        return [None, 1]

    def info(self):
        heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
        return {"numbers": self.numbers, "heavy": heavy, "pid": os.getpid(), "parent": os.getppid()}


class Guess(Environment):
    """No tools: it answers text, and reads calls of its own form."""

    def reset(self, row, seed):
        return Appended(" go on")

    def reply(self, text):
        if text == "raise":
            raise ValueError("no such guess")
        if text == "hang":
            hangs()
        return None if text == "7" else "higher"

    def parse(self, text):
        return [ToolCall("add", '{"a": 1}')] if text.startswith("[") else 5 if text == "five" else None


class Broken(Environment):
    """Fails in the methods that the row names."""

    def __init__(self):
        self.row = {}

    def act(self, name, default):
        do = self.row.get(name, default)
        if do == "raise":
            raise RuntimeError(name)
        if do == "hang":
            hangs()
        return do

    def reset(self, row, seed):
        self.row = row
        return self.act("reset", None)

    def reply(self, text):
        return self.act("reply", None)

    def reward(self):
        return self.act("reward", 1)

    def turn_rewards(self):
        return self.act("turn_rewards", ())

    def info(self):
        return self.act("info", {})

    def state_key(self):
        return self.act("state_key", None)

    def close(self):
        self.act("close", None)


class Stubborn(Environment):
    """Its async tools go wrong each in its own way."""

    @tool
    async def defies(self) -> None:
        """Go on in spite of being cancelled."""
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(100)

    @tool
    async def blocks(self) -> None:
        """Block the event loop."""
        time.sleep(100)

    @tool
    async def exits(self) -> None:
        """End the process."""
        sys.exit(5)

    @tool
    async def fine(self) -> str:
        """Do nothing."""
        return "fine"


class Unreadable(Environment):
    """Answers with what would run code in the trainer."""

    def reset(self, row, seed):
        import grpox.rollout.episodes.episode_process as own

        own.pickle.dumps = lambda answer: b"cos\nsystem\n(S'touch " + row["file"].encode() + b"'\ntR."


class CannotBeBuilt(Environment):
    def __init__(self):
        raise LookupError("no licence")


class UntypedTool(Environment):
    @tool
    def go(self, where):
        """Go."""


class AddToo(Environment):
    @tool
    @documented
    def add(self, a: int) -> int:
        return a + 1


NOT_AN_ENVIRONMENT = Path


@documented
async def meet(count: int) -> str:  # waits until so many calls have begun, in whatever processes
    folder = Path(os.environ["GRPOX_TEST_MEETING"])
    (folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
    while len(os.listdir(folder)) < count:
        await asyncio.sleep(0.005)
    return "met"


@documented
def fault_tool(kind: str) -> str:
    return FAULTS[kind]()
