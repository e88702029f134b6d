"""A run that asks for more memory than there is says in which phase, how much, and which settings to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import processes

LIMITS = """
import os
import resource

import psutil
from grpox import hookimpl


def limit(mib=8):
    room = psutil.Process().memory_info().vms + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def zero(completions, **columns):
    return [0.0] * len(completions)


class BeforeGenerate:
    @hookimpl
    def grpox_step_finished(self):
        limit(mib=2)  # less than the keys and values of 1,024 completions


class BeforeUpdate:
    def scale(self, rewards, weights, group_ids):
        limit()
        return rewards[:, 0]
"""
"""From the call of a hook or scaler on, the process may have 2 or 8 MiB more than it has."""


@pytest.mark.parametrize(
    ("component", "phase", "setting"),
    [
        ("tracking={limits: {path: 'limits.py:BeforeGenerate'}}", "generate", "sampling.max_completion_length"),
        ("advantage={path: 'limits.py:BeforeUpdate'}", "update", "train.per_device_train_batch_size"),
    ],
)
def test_the_phase_the_amount_and_the_settings_are_told(
    tmp_path: Path, component: str, phase: str, setting: str
) -> None:
    (tmp_path / "limits.py").write_text(LIMITS)
    overrides = "train.max_steps=2 train.per_device_train_batch_size=1024 evaluation=null output_dir=run"
    overrides += " sampling.max_completion_length=20 sampling.min_completion_length=20"
    command = ["-m", "grpox", "train", "quickstart", *overrides.split()]
    command += ["rewards=[{path: limits.py:zero}]", component]
    # What is freed goes back to the system, so that what comes later asks anew. It makes the start a cold one.
    done = processes.run(*command, cwd=tmp_path, env={"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    [told] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert told.startswith(f"error: out of memory on rank 0 in phase '{phase}': ")
    assert told.endswith("MiB more were requested")
    assert setting in done.stderr
    assert "allowed" in done.stderr  # the limit of this process is named beside what it uses
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())["error"]
    assert f"phase '{phase}'" in failure
