"""Runs in bfloat16 beside float32; `model.dtype: auto` in the record of a run and when it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

STEPS = 10
SETTINGS = (
    f"train.max_steps={STEPS}",
    "train.warmup_steps=1",
    "evaluation=null",
    "tracking={}",
    "checkpoint.every=10",
)


def train(grpox: Any, *arguments: str) -> str:
    done = grpox("train", "quickstart", *SETTINGS, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return str(done.stderr)


def rewards(folder: Path, run: str) -> list[float]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["reward"] for line in lines]


def dtype_of(folder: Path, run: str) -> str:
    return str(yaml.safe_load((folder / "runs" / run / "config.yaml").read_text())["model"]["dtype"])


@pytest.fixture(scope="module", autouse=True)
def runs(grpox: Any) -> None:
    train(grpox, "model.dtype=auto", "output_dir=runs/auto")
    train(grpox, "model.dtype=bfloat16", "output_dir=runs/bf16")


def test_the_record_has_the_precision_that_auto_was(folder: Path) -> None:
    assert dtype_of(folder, "auto") == "float32"
    assert dtype_of(folder, "bf16") == "bfloat16"


def test_bfloat16_learns_as_float32_does(folder: Path) -> None:
    """Seeds differ by some 0.05 in a step. With one seed, the two precisions draw nearly the same samples."""
    exact, rounded = rewards(folder, "auto"), rewards(folder, "bf16")
    for each in (exact, rounded):
        assert sum(each[-3:]) / 3 > sum(each[:3]) / 3 + 0.08
    assert abs(sum(exact) - sum(rounded)) / STEPS < 0.03


def test_a_run_goes_on_in_the_precision_it_began_with(grpox: Any, folder: Path) -> None:
    """On a CPU auto alone would be float32, which would be another run."""
    output = train(grpox, "model.dtype=auto", "output_dir=runs/bf16", "--resume", "auto")
    assert "the run is complete" in output
    assert dtype_of(folder, "bf16") == "bfloat16"
