"""Plain text of the code, as Markdown that shows it as it is."""

from __future__ import annotations

import re

CODE = re.compile(r"(`+[^`]+`+)")


def prose(text: str) -> str:
    """Text in which only code between backticks is marked up: ``<think>`` is no HTML, ``*`` no emphasis."""
    return "".join(part if CODE.fullmatch(part) else _escaped(part) for part in CODE.split(text))


def _escaped(text: str) -> str:
    return re.sub(r"([*_\[])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
