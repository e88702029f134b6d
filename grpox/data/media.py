"""Images, sounds and videos in rows: none is read, so that a row that has one is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
"""Names of such columns in datasets of prompts."""
KINDS = ("image", "audio", "video")
"""Words in the types of such parts: ``image_url``, ``input_audio``."""
CURE = "text alone; a column that only a reward reads may have another name"


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
