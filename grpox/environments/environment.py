"""The base class of environments, and the mark of their tools."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from grpox.contracts import Message, ToolCall

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__grpox_tool__"
"""Attribute of methods that the model may call."""
APART = "__grpox_tool_"
"""Prefix of the attributes in which an adapter keeps tools that have the name of a method of `Environment`."""


def tool(function: Function) -> Function:
    """Mark a method of an environment as a tool, which the model may call.

    It needs type hints for all parameters and a docstring with a line for each under ``Args:``, from which the
    model's description of the tool is made. It may be async. What it returns becomes text for the model: a
    string as it is, anything else as JSON.
    """
    setattr(function, MARK, True)
    return function


class Appended(str):
    """An observation of `Environment.reset` that continues the last message of the prompt."""

    __slots__ = ()


class Environment:
    """The state of one episode: an instance is built, reset, used and closed for each.

    Methods except `parse` and `state_key` may be async. Built as ``Class(config)`` if it has a config, else as
    ``Class()``.
    """

    example_rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Rows of data for ``grpox plugins check``, which plays an episode with each."""
    example_turns: ClassVar[Sequence[str]] = ()
    """Turns of the model for ``grpox plugins check``; one may hold calls of tools."""
    done: bool = False
    """A tool or `reply` sets it to True to end the episode after this turn."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str | Sequence[Message] | None:
        """Begin the episode.

        Args:
            row: the prompt's row of the dataset, the prompt included.
            seed: equal for all completions of a group; equal seeds must give equal beginnings.

        Returns:
            text or messages that follow the prompt; None if the prompt says all. Text becomes a message of the
            user where prompts are messages.
        """
        return None

    def reply(self, text: str) -> str | Sequence[Message] | None:
        """Answer a turn of the model in which it called no tool; None ends the episode.

        An environment without this method ends with such a turn.
        """
        return None

    def parse(self, text: str) -> Sequence[ToolCall] | None:
        """Read the calls of tools in a turn of the model; None: read them in the form that
        the chat template asks for."""
        return None

    def reward(self) -> float | Mapping[str, float] | None:
        """Return the reward of the episode at its end, or its parts by name; None abstains."""
        return None

    def turn_rewards(self) -> Sequence[float | None]:
        """Return the reward of each turn of the model, at the end; empty if turns have none."""
        return ()

    def state_key(self) -> Hashable:
        """Return a value that is equal in equal states, as anchors of GiGPO; None if unknown."""
        return None

    def info(self) -> Mapping[str, Any]:
        """Return facts about the ended episode for the record, as plain values; ``success`` is counted."""
        return {}

    def close(self) -> None:
        """Release what the episode holds; called once, however it ended."""
