"""Columns that data cannot have: reserved names, and columns with images, sounds or videos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpox.errors import Problem

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments that the core passes to a reward function; all others are columns of the data."""
EPISODE_ARGUMENTS = (
    *("turns", "model_masks", "tool_calls", "environment_rewards", "environment_info"),
    *("row_names", "prompt_ends"),
)
"""Arguments that a reward function gets only if it names them. A column of such a name takes their place; a run
with an environment or tools refuses it."""
OF_TEMPLATE = {"tools": list, "chat_template_kwargs": dict}
"""Columns that the chat template of messages is given, and their types; refused beside an environment or tools,
whose turns a template has to write alike in all rows."""
COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
"""Common names of columns with images, sounds or videos."""
KINDS = ("image", "audio", "video")
"""Words in the types of parts that are not text: ``image_url``, ``input_audio``."""
CURE = "only text; rename a column that only a reward function reads"


def unusable_columns(
    columns: Iterable[str], prompt_column: str, data: str, key: str, has_episodes: bool = False
) -> list[Problem]:
    """List a problem for each column that is not text, or that has the name of a reward function's argument.

    Args:
        prompt_column: may have an argument's name, because reward functions receive it as `prompts`.
        data: name of the data in messages.
        key: key of the run file, named in the problems.
        has_episodes: True for a run with an environment or tools, which has more arguments.
    """
    columns = list(columns)
    arguments = (*REWARD_ARGUMENTS, *((*EPISODE_ARGUMENTS, *OF_TEMPLATE) if has_episodes else ()))
    media = f"{data} has a column that is not text, which grpox cannot read"
    users = "reward functions and of the chat template" if has_episodes else "reward functions"
    reserved = f"{data} has a column with a name that grpox reserves for arguments of {users}"
    renamed = "any other name: rename the column"
    return [
        *(Problem(media, key, given=name, allowed=CURE) for name in media_columns(columns)),
        *(
            Problem(reserved, key, given=name, allowed=renamed)
            for name in columns
            if name in arguments and name != prompt_column
        ),
    ]


def media_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns that hold parts of a prompt other than text."""
    return [column for column in columns if column.lower() in COLUMNS]


def media_part(prompt: Any) -> str:
    """Return the type of the first part of a prompt that is not text; empty if all parts are text."""
    for message in prompt if isinstance(prompt, list) else []:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        beside = media_columns(name for name, value in message.items() if value)
        parts = content if isinstance(content, list) else [content]
        if kinds := [*filter(None, map(_kind, parts)), *beside]:
            return kinds[0]
    return ""


def _kind(part: Any) -> str:
    """Return the type of a part, or the key of its value if it has no type; empty for text."""
    if not isinstance(part, dict):
        return ""
    names = [part["type"]] if part.get("type") else [name for name, value in part.items() if value is not None]
    return next((str(name) for name in names if any(kind in str(name) for kind in KINDS)), "")
