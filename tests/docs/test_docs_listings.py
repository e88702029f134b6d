"""The pages Contracts and Hooks list the sources as they are, so that they can be read without the site."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import listings  # noqa: E402


@pytest.mark.parametrize("page", listings.PAGES)
def test_a_page_lists_the_source_of_today(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == listings.page_of(page), "write the pages anew: python docs/hooks/listings.py"


def test_a_listing_has_sections_code_and_docstrings() -> None:
    source = 'A = 1\n"""One."""\n\n# -- Losses ------\n\n\nclass B:\n    """Two."""\n\n\ndef _c(): ...\n'
    assert listings.listing(source).splitlines() == [
        "",
        "## General",
        "",
        "### `A`",
        "",
        "```python",
        "A = 1",
        '"""One."""',
        "```",
        "",
        "## Losses",
        "",
        "### `B`",
        "",
        "```python",
        "class B:",
        '    """Two."""',
        "```",
    ]
