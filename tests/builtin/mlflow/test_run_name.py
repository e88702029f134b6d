"""A run in MLflow is called by its folder, unless the run file names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.parent import NAMED
from grpox_mlflow.tracker import MlflowTracker


def name_of(folder: Path, run_name: str | None) -> str:
    tracker = MlflowTracker(MlflowConfig(run_name=run_name))
    tracker._folder = folder
    return tracker._name()


def test_a_run_is_called_by_its_folder(tmp_path: Path) -> None:
    assert name_of(tmp_path / "first", None) == "first"
    assert name_of(tmp_path / ("x" * 249 + "yz"), None) == "x" * 248 + "yz"


def test_a_name_in_the_run_file_wins(tmp_path: Path) -> None:
    assert name_of(tmp_path / "first", "mine") == "mine"


def test_a_run_of_a_sweep_has_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMED, "1")
    names = [name_of(tmp_path / "beta=0.1", name) for name in (None, "mine", "x" * 250)]
    assert names[:2] == ["beta=0.1", "mine beta=0.1"]
    assert (len(names[2]), names[2][-10:]) == (250, "x beta=0.1")
