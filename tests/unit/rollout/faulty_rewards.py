"""Reward functions that go wrong in every way that is known; each is called in a process of its own."""

import asyncio
import ctypes
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from grpox.contracts import FailedScore


def lengths(completions, log_metric, log_extra, **_):
    log_metric("mean", sum(map(len, completions)) / len(completions))
    log_extra("text", [text.upper() for text in completions])
    return [float(len(text)) if text else None for text in completions]


async def later(completions, trainer_state, **_):
    await asyncio.sleep(0)
    return [float(trainer_state.global_step)] * len(completions)


class Scaled:
    class Config(BaseModel):
        factor: float = 1.0

    def __init__(self, config):
        self.factor = config.factor

    def __call__(self, answer, **_):
        return [self.factor * value for value in answer]


def draws(completions, **_):
    return [random.random() for _ in completions]


def raises(**_):
    raise OSError("the judge is down")


def raises_much(**_):
    error = OSError("x" * 10_000_000)
    error.add_note("y" * 10_000_000)
    raise error from ValueError("z" * 10_000_000)


def hangs(**_):
    while True:
        time.sleep(1)


async def hangs_awaited(**_):
    await asyncio.sleep(1000)


def hangs_in_c(**_):
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the GIL


def tells_and_hangs_in_c(completions, **_):
    Path(completions[0]).touch()
    hangs_in_c()


def has_no_score(completions, **_):
    return [FailedScore("the verifier is down")] + [1.0] * (len(completions) - 1)


def returns_nan(completions, **_):
    return [math.nan, *[1.0] * (len(completions) - 1)]


def returns_too_few(**_):
    return [1.0]


def returns_too_many(**_):
    return [0.0] * 10_000_000


def takes_all_memory(**_):
    held = []
    for _ in range(64):
        held.append(b"x" * (32 << 20))
        time.sleep(0.02)
    time.sleep(100)


def takes_all_memory_in_children(**_):
    for _ in range(4):
        if os.fork() == 0:
            held = b"x" * (160 << 20)
            time.sleep(100)
            os._exit(len(held) % 2)
    time.sleep(100)


def leaves(**_):
    os._exit(0)


def exits(**_):
    sys.exit(0)


def crashes(**_):
    ctypes.string_at(0)


def is_killed(**_):
    os.kill(os.getpid(), signal.SIGKILL)


def closes_everything(**_):
    os.closerange(3, 1000)
    time.sleep(100)


class Unsendable:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Unreadable:
    def __reduce__(self):
        return sys.exit, (0,)


class Exits(float):
    def __float__(self):
        sys.exit(0)


class Mute(Exception):
    def __str__(self):
        raise ValueError


def logs_what_exits_as_it_is_sent(completions, log_extra, **_):
    log_extra("it", [Unsendable(SystemExit(0)) for _ in completions])
    return [1.0] * len(completions)


def logs_what_exits_as_it_is_read(completions, log_extra, **_):
    log_extra("it", [Unreadable() for _ in completions])
    return [1.0] * len(completions)


def returns_what_cannot_be_sent(completions, **_):
    return [Unsendable(ValueError("no")), *[1.0] * (len(completions) - 1)]


def returns_a_number_that_exits(completions, **_):
    return [Exits() for _ in completions]


def raises_an_interrupt(**_):
    raise KeyboardInterrupt


def raises_without_a_text(**_):
    raise Mute


def leaves_a_child(completions, **_):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    Path(completions[0]).write_text(str(child))
    return [1.0] * len(completions)


def forks_and_forgets(completions, **_):
    os.fork()
    return [1.0] * len(completions)


def prints_much(completions, **_):
    for _ in range(16):
        print("x" * (1 << 20))
    return [1.0] * len(completions)


def prints_one_long_line(completions, **_):
    sys.stdout.write("x" * 50_000_000)
    return [1.0] * len(completions)


def prints_bytes(completions, **_):
    os.write(1, bytes(range(256)) * 100)
    os.write(2, b"\xff\x00")
    return [1.0] * len(completions)


def prints_for_ever(**_):
    print("it begins")
    while True:
        print("x" * 1000)


def prints_between_calls(completions, **_):
    def go_on():
        while not Path(completions[0]).exists():
            time.sleep(0.01)
        for _ in range(50):
            os.write(2, b"y" * 100_000)
        Path(completions[0]).unlink()

    threading.Thread(target=go_on).start()
    return [1.0] * len(completions)


def knows_its_process(completions, **_):
    return [float(os.getpid())] * len(completions)


def sets_an_alarm(completions, **_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [1.0] * len(completions)


class CannotBeBuilt:
    def __init__(self):
        raise RuntimeError("no such judge")


class LeavesAsItIsBuilt:
    def __init__(self):
        os._exit(3)


class Counts:
    """Counts calls and steps; it may kill its process, and its state may be of a kind that it should not be."""

    statistics: ClassVar = {"reward": "mean", "ratio": "gather"}

    def __init__(self):
        self.calls, self.seen, self.step = 0, [], 0

    def __call__(self, completions, **_):
        if "die" in completions:
            os._exit(3)
        self.calls += 1
        return [self.calls + 10.0 * len(self.seen) + 100.0 * self.step] * len(completions)

    def begin_step(self, context):
        self.step = context.step

    def end_step(self, statistics):
        if statistics["reward"] < 0:
            raise ValueError("a negative reward")
        self.seen.append(float(statistics["ratio"].sum()))

    def state_dict(self):
        return {"calls": self.calls, "seen": self.seen if sum(self.seen) < 50 else np.array(self.seen)}

    def load_state_dict(self, state):
        self.calls, self.seen = state["calls"], list(state["seen"])


class Forgets:
    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [1.0] * len(completions)
