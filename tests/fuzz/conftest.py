"""The good model and data beside which every case has its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_case import make_shared


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
