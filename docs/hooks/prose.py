"""Plain text of the code, as Markdown that shows it as it is."""

from __future__ import annotations

import re

CODE = re.compile(r"(`+[^`]+`+)")


def prose(text: str) -> str:
    """Mark up only code between backticks: ``<think>`` is no HTML, ``*`` no emphasis, ``$`` no formula."""
    return "".join(part if CODE.fullmatch(part) else _escaped(part) for part in CODE.split(text))


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("$", "&#36;")
    return re.sub(r"([*_\[])", r"\\\1", text)
