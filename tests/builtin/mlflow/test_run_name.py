"""A run that was given no name has one of its own, whatever the seed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest


def test_runs_of_one_seed_have_different_names() -> None:
    from grpox_mlflow.naming import invented_name

    names = set()
    for _ in range(5):
        random.seed(0)
        names.add(invented_name())
    assert len(names) > 1


def test_it_draws_nothing_of_the_run() -> None:
    from grpox_mlflow.naming import invented_name

    random.seed(0)
    expected = random.random()
    random.seed(0)
    invented_name()
    assert random.random() == expected


def test_a_run_of_a_sweep_is_named_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpox_mlflow.configs import MlflowConfig
    from grpox_mlflow.parent import NAMED
    from grpox_mlflow.tracker import MlflowTracker

    monkeypatch.setenv(NAMED, "1")
    names = []
    for given in (None, "mine", "x" * 250):
        tracker = MlflowTracker(MlflowConfig(run_name=given))
        tracker._folder = tmp_path / "beta=0.1"
        names.append(tracker._name())
    assert names[:2] == ["beta=0.1", "mine beta=0.1"]
    assert (len(names[2]), names[2][-10:]) == (250, "x beta=0.1")
