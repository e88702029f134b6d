"""Sums, with a calculator that costs something: worth a call only where the model cannot add by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpox.environments import Environment, ToolCall, tool
from grpox_environments.configs import CalculatorConfig

SUM = re.compile(r"([0-9]{1,18})\+([0-9]{1,18})=\s*$")
CALL = re.compile(r"\s*\[([0-9]{1,18})\+([0-9]{1,18})\]\s*")


class Calculator(Environment):
    """The prompt ends with a sum, such as ``37+68=``. The model answers ``105``, or first asks ``[37+68]``.

    The calculator says ``=105;``, and the model goes on. The reward is 1 for the right answer, less the cost of
    each call.
    """

    example_rows = ({"prompt": "37+68=", "answer": "105"},)
    example_turns = ("[37+68]", "105")

    def __init__(self, config: CalculatorConfig) -> None:
        self.config = config
        self.terms = (0, 0)
        self.answer: str | None = None
        self.calls = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Read the sum.

        Raises:
            ValueError: the prompt does not end with one.
        """
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        match = SUM.search(text)
        if not match:
            raise ValueError(f"the prompt is {text!r}: it must end with a sum, such as '37+68='")
        self.terms = (int(match[1]), int(match[2]))

    def parse(self, text: str) -> Sequence[ToolCall] | None:
        """Read a turn that is a call and nothing else."""
        match = CALL.fullmatch(text)
        if not match:
            return None
        return (ToolCall("add", json.dumps({"a": int(match[1]), "b": int(match[2])})),)

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        self.calls += 1
        return f"={a + b};"

    def reply(self, text: str) -> None:
        """Take the answer, which ends the episode."""
        self.answer = text.strip()

    def reward(self) -> Mapping[str, float]:
        """Return 1 for the right answer, and the cost of all calls."""
        return {"right": float(self.success), "calls": -self.config.cost * self.calls}

    def info(self) -> Mapping[str, Any]:
        """Return success, whether the sum carries, and whether the calculator was called without need."""
        called = self.calls > 0
        needless = {} if self.carries else {"calls_without_carry": called}
        return {"success": self.success, "carries": self.carries, "called": called, **needless}

    @property
    def success(self) -> bool:
        """True for the right answer."""
        return self.answer == str(sum(self.terms))

    @property
    def carries(self) -> bool:
        """True if two digits of the same place have a sum above 9."""
        a, b = (str(term)[::-1] for term in self.terms)
        return any(int(x) + int(y) > 9 for x, y in zip(a, b, strict=False))
