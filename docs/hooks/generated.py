"""Replaces markers in pages by text made from the code: ``<!-- generated: commands -->``.

Such a page stands in docs/ with its title and introduction, so that links to it work wherever it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from builtins_page import built_ins
from cli_page import commands
from key_tables import key_tables

GENERATORS: dict[str, Callable[[], str]] = {
    "built-ins": built_ins,
    "commands": commands,
    **key_tables(),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each marker of a page by what is generated. An unknown one ends the build."""
    return re.sub(r"^<!-- generated: (\S+) -->$", lambda at: GENERATORS[at[1]](), markdown, flags=re.MULTILINE)
