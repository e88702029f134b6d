"""Code of others that crashes, hangs or ends the process: the run says so, and leaves no process behind."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from support.killing import finish
from support.run_files import SHORT, metrics_of

FEW = (*SHORT, "train.max_steps=2")
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
LEAVING = """
import sys
from torch.optim.lr_scheduler import LambdaLR

class Rows:
    def load(self):
        raise KeyboardInterrupt

class Leaves(LambdaLR):
    def __init__(self, optimizer):
        self.begun = False
        super().__init__(optimizer, lambda step: 1.0)
        self.begun = True

    def step(self, *arguments):
        if self.begun:
            sys.exit(0)
        super().step(*arguments)

class Schedule:
    def build(self, optimizer, total_steps):
        return Leaves(optimizer)
"""


@pytest.fixture(scope="module", autouse=True)
def faulty(folder: Path) -> None:
    (folder / "faulty.py").write_text(FAULTY)
    (folder / "leaving.py").write_text(LEAVING)


def left(folder: Path) -> list[int]:
    """The processes of reward functions that have not ended; the list begins anew."""
    file = folder / "pids.txt"
    pids = [int(line) for line in file.read_text().split()]
    file.unlink()
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_what_crashes_hangs_and_leaves_is_counted_and_the_run_goes_on(folder: Path) -> None:
    # Only the one that never answers has so little time: the others' processes may start slowly.
    timeouts = {"leaves": 600, "crashes": 600, "hangs": 2}
    own = ", ".join(
        f"{{path: 'faulty.py:{name}', on_error: abstain, timeout: {seconds}}}"
        for name, seconds in timeouts.items()
    )
    rewards = f"rewards=[exact, {{name: exact, isolation: process}}, {own}]"
    stderr = finish(folder, "quickstart", *FEW, rewards, "output_dir=runs/abstains")
    steps = metrics_of(folder / "runs" / "abstains")
    errors = [[step[f"rewards/{name}/errors"] for step in steps] for name in timeouts]
    assert errors == [[0, 256], [256, 256], [256, 256]]
    for step in steps:
        assert step["rewards/exact-2/mean"] == step["rewards/exact/mean"]
    for name, cause in (
        ("leaves", "exit code 0"),
        ("crashes", "signal 11 (SIGSEGV)"),
        ("hangs", "timeout of 2 s"),
    ):
        warnings = (line for line in stderr.splitlines() if "WARNING" in line)
        [line] = [line for line in warnings if f"reward '{name}' " in line]
        assert f"{cause} (faulty.py:" in line
    assert left(folder) == []


def test_a_function_that_leaves_fails_the_run_by_name(folder: Path) -> None:
    reward = "rewards=[exact, {path: 'faulty.py:leaves'}]"
    stderr = finish(folder, "quickstart", *FEW, reward, "output_dir=runs/fails", code=1)
    assert "reward 'leaves' " in stderr
    assert "exit code 0 (faulty.py:" in stderr
    assert "Traceback" not in stderr
    assert left(folder) == []


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "data={source: {path: 'leaving.py:Rows'}}",
            "dataset 'Rows' raised KeyboardInterrupt (leaving.py:7)",
        ),
        (
            "train.scheduler={path: 'leaving.py:Schedule'}",
            "code that the run calls raised SystemExit: 0 (leaving.py:17)",
        ),
    ],
    ids=["interrupt", "exit deep in the libraries"],
)
def test_an_end_of_the_process_ends_the_run_by_name(folder: Path, setting: str, told: str) -> None:
    name = setting.partition("=")[0]
    assert told in finish(folder, "quickstart", *FEW, setting, f"output_dir=runs/{name}", code=1)
    if "SystemExit" in told:
        failure = json.loads((folder / "runs" / name / "failure.json").read_text())
        assert failure == {"error": f"RunFailed: {told}"}
