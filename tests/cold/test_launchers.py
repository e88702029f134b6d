"""torchrun and the deepspeed launcher start one and the same run on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patient
from support.ports import free_port

RUN = [
    "train",
    "quickstart",
    "train.max_steps=2",
    "train.per_device_train_batch_size=32",
    "train.warmup_steps=0",
]
RUN += ["evaluation=null", "tracking={}"]
BIN = Path(sys.executable).parent


def metrics_of(folder: Path, name: str, *launcher: str) -> list[dict[str, float]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*launcher, *RUN, f"output_dir={name}"]
    limit = patient(240)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 steps on 2 ranks" in done.stdout
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if "metrics" in line]


def test_both_launchers_start_the_same_run(tmp_path: Path) -> None:
    port = f"--master_port={free_port()}"
    deepspeed = [str(BIN / "deepspeed"), "--num_accelerators=2", port, "--module", "grpox"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m", "grpox"]
    ours = metrics_of(tmp_path, "deepspeed", *deepspeed)
    theirs = metrics_of(tmp_path, "torchrun", *torchrun)
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "reward", "grad_norm", "entropy", "learning_rate"):
            assert one[name] == pytest.approx(other[name], rel=1e-6)
    assert ours[0]["loss"] != ours[1]["loss"]
