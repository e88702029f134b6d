"""A forked run is bit by bit the cold one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.killing import assert_same, recorded, start
from support.mlflow_store import migrated_store

OF_A_MOMENT = re.compile(
    r"[\d,]+ tokens/s|[\d.]+ s/step|\d+ s left|MLflow run \w{32}"
    r"|│ time +│[^│]*│|│ +│ [^│]*(?:before the first step|in steps|evaluating and saving) *│"
    r"|[┌┬┐└┴┘─]+| +(?=│|\n)"
)
"""Printed text that differs from run to run: times, identifiers, and the width of a table with times."""
SETTINGS = ("train.max_steps=8", "train.per_device_train_batch_size=64", "checkpoint.every=2")
ON_TWO = ("train.max_steps=2", "train.per_device_train_batch_size=32", "evaluation=null", "tracking={}")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPOX_TESTS_COLD", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.parametrize(("ranks", "settings"), [(1, SETTINGS), (2, ON_TWO)], ids=["one rank", "two ranks"])
def test_a_run_is_bit_by_bit_the_cold_one(tmp_path: Path, ranks: int, settings: tuple[str, ...]) -> None:
    """With two ranks the cold one is torchrun's."""
    printed = []
    for name in ("forked", "cold"):
        (tmp_path / name).mkdir()
        migrated_store(tmp_path / name)
        process = start(tmp_path / name, "quickstart", *settings, ranks=ranks, cold=name == "cold")
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert all(" INFO rank 0 " in line for line in stderr.splitlines()) or name == "cold"
        printed.append(OF_A_MOMENT.sub("", stdout))
    forked, cold = (tmp_path / name / "runs" / "quickstart" for name in ("forked", "cold"))
    assert_same(forked, cold)
    assert len(recorded(forked)) >= 2
    assert printed[0] == printed[1]
    assert "step 2/" in printed[0]
