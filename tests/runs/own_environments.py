"""An environment with a tool on the quickstart's sums, a reward that reads episodes, and an early generator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpox.config import SamplingConfig
from grpox.contracts import Prompt, Rollout
from grpox.environments import Environment, ToolCall, tool
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class Sums(Environment):
    """Up to three turns: an odd digit calls the tool, a 0 one that does not exist; a turn is good with a 7."""

    def __init__(self) -> None:
        self.sevens: list[bool] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Continue every second group's prompt."""
        return "1+" if seed % 2 else None

    def parse(self, text: str) -> list[ToolCall]:
        self.sevens.append("7" in text)
        self.done = len(self.sevens) == 3
        if text[:1] in ("1", "3", "5"):
            return [ToolCall("add", json.dumps({"a": 1, "b": len(self.sevens)}))]
        return [ToolCall("take", "{}")] if text[:1] == "0" else []

    def reply(self, text: str) -> str:
        return "+1="

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One number.
            b: Another number.
        """
        return f"{a + b}+"

    def reward(self) -> dict[str, float]:
        """Return a point a seven, less something for each turn."""
        return {"sevens": float(sum(self.sevens)), "turns": -0.25 * len(self.sevens)}

    def turn_rewards(self) -> list[float]:
        return [float(seven) for seven in self.sevens]

    def state_key(self) -> tuple[bool, ...]:
        return tuple(self.sevens)

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"success": any(self.sevens), "sevens": self.sevens}
        return info | ({"late": self.sevens[-1]} if len(self.sevens) > 1 else {})


def read(completions: Sequence[str], turns: Any, tool_calls: Any, environment_info: Any) -> list[float]:
    """Check that what the function gets is about one episode, and count its calls."""
    for text, of_each, calls, info in zip(completions, turns, tool_calls, environment_info, strict=True):
        assert all(turn in text for turn in of_each)
        assert len(info["sevens"]) in (len(of_each), len(of_each) - 1)  # a turn that is cut off is not read
        assert all(call["content"] in text or call["turn"] == len(of_each) - 1 for call in calls)
    return [float(len(calls)) for calls in tool_calls]


class Ahead(HfGenerator):
    """Samples with a copy of the weights while these are updated."""

    provides = ("logprobs", "max_tokens", "ahead")

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        return list(super().generate(prompts, sampling, seed))

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        yield from super().generate(prompts, sampling, seed)
