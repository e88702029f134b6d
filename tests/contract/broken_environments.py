"""Environments that break their contract, each in one way, and some that keep it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from support.documented import documented

from grpox.contracts import ToolCall
from grpox.environments import Environment, tool


class Right(Environment):
    """Counts to a goal by a tool; a turn without a call ends the episode."""

    class Config(BaseModel):
        goal: int = 3

    example_rows = ({"prompt": "Count.", "goal": 2}, {"prompt": "Count."})
    example_turns = ('<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>', "done")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.total = 0
        self.turns = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.goal = row.get("goal", self.config.goal)
        return f"Count to {self.goal}, seed {seed}."

    @tool
    @documented
    def add(self, number: int, how: Literal["up", "down"] = "up") -> str:
        self.turns += 1
        self.total += number if how == "up" else -number
        return f"The total is {self.total}."

    def reply(self, text: str) -> None:
        self.turns += 1

    def reward(self) -> dict[str, float]:
        return {"right": float(self.total == self.goal)}

    def state_key(self) -> Hashable:
        return ("total", self.total, frozenset({"a", "b", "c"}))

    def info(self) -> dict[str, Any]:
        return {"success": self.total == self.goal}


class ReadsItsCalls(Environment):
    """Takes a turn of one word as the call of its tool."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None: ...

    @tool
    @documented
    def add(self, number: int) -> str:
        return str(number)

    def parse(self, text: str) -> list[ToolCall]:
        return [ToolCall("add", f'{{"number": {len(text)}}}')] if text.isalpha() else []


class Asynchronous(Environment):
    """Awaits everywhere."""

    example_rows = ({"prompt": "Wait."},)
    example_turns = ("a", "b")

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return "begin"

    async def reply(self, text: str) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return text

    @tool
    @documented
    async def wait(self, steps: int) -> int:
        await asyncio.sleep(0)
        return steps

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)


class OfTrl:
    """An environment in TRL's form."""

    def reset(self, **row: Any) -> str:
        self.total = 0
        return "begin"

    @documented
    def add(self, number: int) -> str:
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        return float(self.total)


class _Plain(Environment):
    """The base of those that break one rule."""

    example_rows = ({"prompt": "Go."},)
    example_turns = ("a", "b")

    def reply(self, text: str) -> Any:
        return "go on"


def with_tool(name: str, act: Callable[[], Any]) -> type:
    """Make an environment with a tool that has no parameters."""

    def call(self):  # type: ignore[no-untyped-def] # a hint would make it a parameter of the tool
        """Act."""
        return act()

    call.__name__ = name
    return type("WithTool", (_Plain,), {name: tool(call), "__module__": __name__})


ToolHangs = with_tool("wait", lambda: time.sleep(1000))
ToolPrints = with_tool("talk", lambda: [print("x" * 1000) for _ in range(3000)] and "done")
ToolReturnsMuch = with_tool("read", lambda: "x" * 3_000_000)
ToolKills = with_tool("crash", lambda: os.kill(os.getpid(), signal.SIGKILL))


class ToolHangsInspite(_Plain):
    @tool
    def wait(self) -> None:
        """Wait for ever, whatever happens."""
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(1)


class ToolRaises(_Plain):
    @tool
    @documented
    def divide(self, number: int) -> float:
        return number / 0


class ToolIsUndescribed(_Plain):
    @tool
    def move(self, where: str) -> None:
        """Move.

        where: described, but not under a heading.
        """


class NothingToDo(Environment):
    """Neither tools nor replies."""


class ResetNeedsAColumn(Environment):
    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.answer = row["solution"]

    def reply(self, text: str) -> None:
        return None


def breaks(method: str, function: Callable[..., Any]) -> type:
    """Make an environment that breaks a rule in one method."""
    return type("Breaks", (_Plain,), {method: function, "__module__": __name__})


ResetHangs = breaks("reset", lambda self, row, seed: time.sleep(1000))
ResetByChance = breaks("reset", lambda self, row, seed: os.urandom(4).hex())
ChangesItsRow = breaks("reset", lambda self, row, seed: row.update(prompt="changed"))
AnswersByTime = breaks("reply", lambda self, text: str(time.perf_counter_ns()))
ReplyNeedsAWord = breaks("reply", lambda self, text: text.split()[0])
ReplyPrints = breaks("reply", lambda self, text: print("y" * 500_000) or "go on")
RewardByChance = breaks("reward", lambda self: float(os.urandom(1)[0]) + time.perf_counter())
RewardIsNaN = breaks("reward", lambda self: float("nan"))
OneTurnReward = breaks("turn_rewards", lambda self: [1.0])
InfoHasAnObject = breaks("info", lambda self: {"thread": threading.current_thread()})
KeyIsAHash = breaks("state_key", lambda self: hash("a state"))
KeyIsAnObject = breaks("state_key", lambda self: object())


class SharesItsState(_Plain):
    """Keeps the total of all instances on the class."""

    seen: list[str] = []  # noqa: RUF012 - that is the fault

    def reply(self, text: str) -> str:
        self.seen.append(text)
        return f"{len(self.seen)} turns"


class CloseNeedsReset(_Plain):
    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.client = "open"

    def close(self) -> None:
        del self.client


LeavesAProcess = breaks("reset", lambda self, row, seed: subprocess.Popen(["sleep", "20"]) and None)


class LeavesAThread(_Plain):
    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        threading.Thread(target=time.sleep, args=(20,), name="left over", daemon=True).start()


class LeavesAFile(_Plain):
    def __init__(self) -> None:
        self.file = open(os.path.abspath(__file__), encoding="utf-8")  # noqa: SIM115 - that is the fault
        KEPT.append(self.file)


KEPT: list[Any] = []
