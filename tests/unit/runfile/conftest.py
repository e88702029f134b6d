"""A folder in which runs are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.run_checks import Runs


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Runs(tmp_path)
