"""Columns that data cannot have: nothing would read them, or they hold images, sounds or videos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpox.errors import Problem

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments that the core itself passes to a reward function; all others are columns of the data."""
COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
"""Names of such columns in datasets of prompts."""
KINDS = ("image", "audio", "video")
"""Words in the types of such parts: ``image_url``, ``input_audio``."""
CURE = "text alone; a column that only a reward reads may have another name"


def unusable_columns(columns: Iterable[str], prompt_column: str, data: str, key: str) -> list[Problem]:
    """A problem for each column of what is no text, or with the name of an argument that rewards are given.

    Args:
        prompt_column: the one that may have an argument's name, since functions see it as `prompts`.
        data: what messages call the data.
        key: of the run file, named in the problems.
    """
    columns = list(columns)
    media = f"{data} has a column of what is no text, which is not read"
    reserved = f"{data} has a column with the name of an argument that grpox itself gives to reward functions"
    renamed = "any other name: rename the column"
    return [
        *(Problem(media, key, given=name, allowed=CURE) for name in media_columns(columns)),
        *(
            Problem(reserved, key, given=name, allowed=renamed)
            for name in columns
            if name in REWARD_ARGUMENTS and name != prompt_column
        ),
    ]


def media_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns that hold parts of a prompt which are no text."""
    return [column for column in columns if column.lower() in COLUMNS]


def media_part(prompt: Any) -> str:
    """The type of the first part of a prompt's messages that is no text; empty where all are."""
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
    """The type of a part, or where it has none the key of its value; empty for text."""
    if not isinstance(part, dict):
        return ""
    names = [part["type"]] if part.get("type") else [name for name, value in part.items() if value is not None]
    return next((str(name) for name in names if any(kind in str(name) for kind in KINDS)), "")
