"""The good model and data beside which every case has its folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from fuzz_case import make_shared

from grpox.plugins import discovery


@pytest.fixture(scope="module", autouse=True)
def _entry_points_once() -> Iterator[None]:
    """Read the entry points of the environment once: no case changes them."""
    found = metadata.entry_points(group=discovery.ENTRY_POINT_GROUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "metadata", SimpleNamespace(entry_points=lambda group: found))
        yield


@pytest.fixture(scope="session")
def fuzz_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz")
    make_shared(root / "shared")
    return root


@pytest.fixture
def case_folder(
    fuzz_root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty working directory beside ``shared/``."""
    folder = fuzz_root / f"case{len(list(fuzz_root.iterdir()))}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return folder
