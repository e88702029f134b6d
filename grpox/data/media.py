"""Images, sounds and videos in rows: none is read, so that a row that has one is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
"""What such columns are called in datasets of prompts."""
KINDS = ("image", "audio", "video")
"""What the types of such parts have in them: ``image_url``, ``input_audio``."""
CURE = "text alone; a column that only a reward reads may have another name"


def media_columns(columns: Iterable[str]) -> list[str]:
    """Those of `columns` that hold what belongs to a prompt and is no text."""
    return [column for column in columns if column.lower() in COLUMNS]


def media_part(prompt: Any) -> str:
    """The type of the first part of a prompt's messages that is no text; empty where all are."""
    messages = prompt if isinstance(prompt, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return next((kind for part in parts if isinstance(part, dict) and (kind := _kind(part))), "")


def _kind(part: dict[str, Any]) -> str:
    """The type of a part, or where it has none the key of its value; empty for text."""
    names = [part["type"]] if part.get("type") else [name for name, value in part.items() if value is not None]
    return next((str(name) for name in names if any(kind in str(name) for kind in KINDS)), "")
