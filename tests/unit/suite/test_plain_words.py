"""Names and docstrings that are not plain are found, and those of libraries are not."""

from __future__ import annotations

import pytest
from support.plain_words import problems_of


@pytest.mark.parametrize(
    "source",
    [
        "told = 1",
        "def errors_told(): ...",
        "class HeldOut: ...",
        "def score(asked): ...",
        "run(taken=1)",
        "self._kept = 1",
        "from files import found",
        "import numpy as made",
        '"""What a file is."""',
        'def name():\n    """Whether it is so."""',
        'class Name:\n    """Those of a run."""',
        'SECONDS = 1.0\n"""How long a call may take."""',
        'class Name:\n    seconds: float = 1.0\n    """Of one call."""',
        'def name(self):\n    self.seconds = 1.0\n    """Of one call."""',
        'if True:\n    pass\nelse:\n    seconds = 1.0\n    r"""\n    Of one call."""',
    ],
)
def test_one_problem(source: str) -> None:
    assert len(list(problems_of(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    pass\nexcept FileNotFoundError:\n    pass",
        "makes, foundation, untold, retaken, basket = range(5)",
        "text = 'told and found'",
        '"""Whatever is read."""',
        'def name():\n    """Return what is there."""',
        'SECONDS = 1.0\n"""Limit of a call."""',
        'def name():\n    return lambda: "What a text"',
        'name = 1\nprint(name)\n"""What follows a call is no docstring."""',
    ],
)
def test_no_problem(source: str) -> None:
    assert list(problems_of(source)) == []
