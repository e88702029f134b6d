"""Distributions that a page installs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.docs_install import Install, installing


@pytest.fixture
def install() -> Iterator[Install]:
    with installing() as install:
        yield install
