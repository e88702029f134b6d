"""Whole runs with rewards that crash, hang and leave: the run says so, and leaves no process behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

GrpoxCommand = Callable[..., Any]
SHORT = ("train.max_steps=2", "evaluation=null", "tracking={}")
FAULTY = """
import ctypes, os, time
from pathlib import Path

def note():
    with open("pids.txt", "a") as file:
        print(os.getpid(), file=file)

def leaves(completions, trainer_state, **_):
    note()
    if trainer_state.global_step == 1:
        os._exit(0)
    return [0.0] * len(completions)

def crashes(completions, **_):
    note()
    ctypes.string_at(0)

def hangs(completions, **_):
    note()
    ctypes.PyDLL(None).sleep(10_000)
"""


@pytest.fixture(scope="module", autouse=True)
def faulty(folder: Path) -> None:
    (folder / "faulty.py").write_text(FAULTY)


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if "reward" in (found := json.loads(line)["metrics"])]


def left(folder: Path) -> list[int]:
    """The processes of reward functions that have not ended; the list begins anew."""
    file = folder / "pids.txt"
    pids = [int(line) for line in file.read_text().split()]
    file.unlink()
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_what_crashes_hangs_and_leaves_is_counted_and_the_run_goes_on(
    grpox: GrpoxCommand, folder: Path
) -> None:
    # Only the one that never answers has so little time: the others' processes may start slowly.
    timeouts = {"leaves": 600, "crashes": 600, "hangs": 2}
    own = ", ".join(
        f"{{path: 'faulty.py:{name}', on_error: abstain, timeout: {seconds}}}"
        for name, seconds in timeouts.items()
    )
    rewards = f"rewards=[exact, {{name: exact, isolation: process}}, {own}]"
    done = grpox("train", "quickstart", *SHORT, rewards, "output_dir=runs/abstains")
    assert done.returncode == 0, done.stderr
    errors = [
        [step[f"rewards/{name}/errors"] for step in metrics(folder, "abstains")]
        for name in ("leaves", "crashes", "hangs")
    ]
    assert errors == [[0, 256], [256, 256], [256, 256]]
    for step in metrics(folder, "abstains"):
        assert step["rewards/exact-2/mean"] == step["rewards/exact/mean"]
    for name, cause in (
        ("leaves", "exit code 0"),
        ("crashes", "signal 11 (SIGSEGV)"),
        ("hangs", "timeout of 2 s"),
    ):
        warnings = (line for line in done.stderr.splitlines() if "WARNING" in line)
        lines = [line for line in warnings if f"reward '{name}' " in line]
        assert len(lines) == 1, lines
        [line] = lines
        assert f"{cause} (faulty.py:" in line
    assert left(folder) == []


def test_a_function_that_leaves_fails_the_run_by_name(grpox: GrpoxCommand, folder: Path) -> None:
    reward = "rewards=[exact, {path: 'faulty.py:leaves'}]"
    done = grpox("train", "quickstart", *SHORT, reward, "output_dir=runs/fails")
    assert done.returncode == 1
    assert "reward 'leaves' " in done.stderr
    assert "exit code 0 (faulty.py:" in done.stderr
    assert "Traceback" not in done.stderr
    assert left(folder) == []
