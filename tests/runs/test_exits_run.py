"""Code of others that would end the process ends the run instead: by name, and with an exit code of failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

GrpoxCommand = Callable[..., Any]
SHORT = ("train.max_steps=1", "evaluation=null", "tracking={}")
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


def run(grpox: GrpoxCommand, folder: Path, name: str, setting: str) -> Any:
    file = folder / "leaving.py"
    file.write_text(LEAVING)
    return grpox("train", "quickstart", *SHORT, f"output_dir=runs/{name}", setting.format(f"{file}:{name}"))


def test_an_interrupt_that_no_signal_raised_ends_the_run_by_name(grpox: GrpoxCommand, folder: Path) -> None:
    ended = run(grpox, folder, "Rows", "data={{source: {{path: '{}'}}}}")
    assert ended.returncode == 1, ended.stderr[-4000:]
    assert "dataset 'Rows' raised KeyboardInterrupt (leaving.py:7)" in ended.stderr


def test_an_exit_deep_in_the_libraries_is_no_run_that_went_well(grpox: GrpoxCommand, folder: Path) -> None:
    ended = run(grpox, folder, "Schedule", "train.scheduler={{path: '{}'}}")
    told = "code that the run calls raised SystemExit: 0 (leaving.py:17)"
    assert ended.returncode == 1, ended.stderr[-4000:]
    assert f"error: {told}" in ended.stderr
    failure = json.loads((folder / "runs" / "Schedule" / "failure.json").read_text())
    assert failure == {"error": f"RunFailed: {told}"}
