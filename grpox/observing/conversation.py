"""The conversation of an episode for people: who speaks, what, and which tools the model calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")


class Speech(NamedTuple):
    """One message."""

    speaker: str
    """Role of the message; of a tool's answer also the tool."""
    text: str
    """Its text, and below it a line for each call of a tool: ``add({"a": 1, "b": 2})``."""


def speeches(messages: Sequence[Mapping[str, Any]]) -> list[Speech]:
    """Return what each message says."""
    return [_speech(message) for message in messages]


def ends(items: Sequence[Item], most: int) -> tuple[Sequence[Item], int, Sequence[Item]]:
    """Return the first items, the number of those left out, and the last ones, `most` in all."""
    left_out = len(items) - most
    if left_out <= 0:
        return items, 0, ()
    return items[: most // 2], left_out, items[len(items) - most + most // 2 :]


def _speech(message: Mapping[str, Any]) -> Speech:
    role, name, content, calls = (message.get(key) for key in ("role", "name", "content", "tool_calls"))
    if not isinstance(content, str | None):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    lines = [content] if content else []
    for call in calls if isinstance(calls, list | tuple) else ():
        if isinstance(call, Mapping):  # in OpenAI's form, or in that of its inner part
            function = call.get("function")
            function = function if isinstance(function, Mapping) else call
            lines.append(f"{function.get('name')}({function.get('arguments')})")
    return Speech(f"{role} {name}" if role == "tool" and name else str(role), "\n".join(lines))
