"""Distributions that a page takes as installed, for as long as a test lasts."""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from grpox.plugins.registry import installed
from support.docs_blocks import ROOT
from support.fixtures import MakeDistribution, forget_modules, write_metadata

Install = Callable[[Path], None]
OFFERS_DAPO = """\
import grpox


@grpox.hookimpl
def grpox_losses():
    yield grpox.ComponentSpec("dapo", "grpox_losses.losses:Dapo", "grpox_losses.configs:ClippedConfig")
"""
OFFER_DAPO_TOO = ("my-plugin", "grpox-foo")
"""Names that stand on a page for some distribution that offers what grpox does."""


@contextmanager
def installing() -> Iterator[Install]:
    """``install(folder)`` does what ``pip install -e folder`` does, until the block ends."""
    before, folders = list(sys.path), []
    installed.cache_clear()

    def install(folder: Path) -> None:
        about = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        write_metadata(Path(site), about["name"], about["version"], about["entry-points"]["grpox"])
        sys.path.insert(1, str(folder / "src"))
        folders.append(f"{folder}{os.sep}")
        importlib.invalidate_caches()
        installed.cache_clear()

    with TemporaryDirectory() as site:
        sys.path.insert(1, site)
        try:
            yield install
        finally:
            sys.path[:] = before
            installed.cache_clear()
            forget_modules(*folders)


def install_named(text: str, make_distribution: MakeDistribution) -> None:
    """Install what offers dapo too, where `text` names it as ``name:dapo``."""
    for name in OFFER_DAPO_TOO:
        if f"{name}:dapo" in text:
            make_distribution(name, OFFERS_DAPO)
            installed.cache_clear()


def install_example(page: Path, install: Install) -> None:
    """Install the example distribution that a page is about, if it is about one."""
    if page.parent.parent.name == "examples":
        install(page.parent)
    elif page.stem == "writing-a-plugin":
        install(ROOT / "plugins" / "examples" / "grpox-gmpo")
