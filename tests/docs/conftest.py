"""The folder in which the reader of a page works, and what a page installs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.docs_install import Install, install_named, installing
from support.fixtures import MakeDistribution


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def install() -> Iterator[Install]:
    with installing() as install:
        yield install


@pytest.fixture
def install_distributions(make_distribution: MakeDistribution) -> Callable[[str], None]:
    """Install what a text names as ``name:dapo``."""
    return lambda text: install_named(text, make_distribution)
