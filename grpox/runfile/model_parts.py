"""Parts of a model for images, sounds or videos, by its configuration: only text is trained, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpox.errors import Problem

PARTS = re.compile(
    r".*(vision|visual|image|audio|video|speech).*_config|vq_config|visual|(img|image|audio)_processor"
)
"""Keys of a configuration that describe such a part, where a mapping is their value."""


def media_parts(config: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Dotted keys of a model's configuration that describe a part for something else than text."""
    for key, value in config.items():
        if not isinstance(value, Mapping) or not value:
            continue
        if PARTS.fullmatch(str(key)):
            yield f"{within}{key}"
        else:
            yield from media_parts(value, f"{within}{key}.")


def media_problem(config: Mapping[str, Any], key: str, given: str) -> Problem | None:
    """Return a problem where a model has such a part; None where all of it is for text."""
    found = list(media_parts(config))
    if not found:
        return None
    what = (
        f"is a model of more than text (its config has {', '.join(found)}): it would be trained on text alone, "
        "and what is saved may lack the other parts"
    )
    return Problem(what, key, given=given, allowed="a model of text, such as its language model saved alone")


def media_problem_of(folder: Path, key: str) -> Problem | None:
    """The same of a model's folder; what is no readable configuration is left for loading to refuse."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return media_problem(config, key, str(folder)) if isinstance(config, dict) else None
