"""The page that works a step by hand says what Python and the core say."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "by-hand.md"


def test_every_number_of_the_page_is_what_its_code_gives() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert (failed, tried > 10) == (0, True)
