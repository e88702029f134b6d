"""Kills a run as a machine that goes down would, has it resumed, and compares what two runs left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from pyarrow import parquet
from safetensors.torch import load_file

OF_THIS_MACHINE = ("step_time", "time/", "memory/", "tokens_per_second/")
"""Metrics that are never the same twice: names and beginnings of names."""


def start(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.Popen[str]:
    """`grpox train` in `folder`, under torchrun for several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "grpox", "train", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Every process of it, at once."""
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in everyone:
        if each.is_running():
            each.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> bool:
    """Until the run has recorded so many steps; False if it ended before."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b'"metrics"') >= steps:
            return True
        time.sleep(0.01)
    return False


def recorded(run: Path) -> list[dict[str, Any]]:
    """What the run measured, without what depends on the machine and the moment."""
    lines = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        del told["time"]
        for kind in told.keys() - {"step"}:
            told[kind] = {name: v for name, v in told[kind].items() if not name.startswith(OF_THIS_MACHINE)}
        lines.append(told)
    return lines


def assert_same(run: Path, other: Path) -> None:
    """Metrics, completions and weights, bit by bit."""
    assert recorded(run) == recorded(other)
    completions = sorted(path.name for path in (run / "completions").iterdir())
    assert completions == sorted(path.name for path in (other / "completions").iterdir())
    for name in completions:
        tables = [parquet.read_table(each / "completions" / name) for each in (run, other)]
        assert tables[0].equals(tables[1]), name
    weights = [load_file(each / "model" / "model.safetensors") for each in (run, other)]
    assert weights[0].keys() == weights[1].keys()
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
