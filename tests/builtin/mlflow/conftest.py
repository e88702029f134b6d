"""A real SQLite store for each file of tests, and time for all of it."""

from __future__ import annotations

import pytest
from support.mlflow_store import migrated_store
from support.patience import patient


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of one database for the whole file."""
    return f"sqlite:///{migrated_store(tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, the end of a run waits for all of it."""
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", patient(300))
