"""Kills a run as a machine that goes down would, has it resumed, and compares what two runs left."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from support import processes
from support.patience import patient
from support.processes import Process

OF_THIS_MACHINE = ("step_time", "time/", "memory/", "tokens_per_second/")
"""Metrics that are never the same twice: names and beginnings of names."""


def start(folder: Path, *arguments: str, ranks: int = 1, cold: bool = False, vllm: bool = False) -> Process:
    """Start `grpox train` in `folder`."""
    return processes.start("-m", "grpox", "train", *arguments, cwd=folder, ranks=ranks, cold=cold, vllm=vllm)


def finish(folder: Path, *arguments: str, code: int = 0, **options: Any) -> str:
    """Run `grpox train` in `folder` to its end, which is `code`; return its standard error."""
    process = start(folder, *arguments, **options)
    stderr = str(process.communicate()[1])
    assert process.returncode == code, stderr
    return stderr


def kill_and_resume(folder: Path, *arguments: str, steps: int, pause: float = 0.0, **options: Any) -> Path:
    """Run in ``runs/killed``, kill it after so many steps, and resume it to its end; return its folder."""
    run = folder / "runs" / "killed"
    process = start(folder, *arguments, "output_dir=runs/killed", **options)
    assert wait_for_steps(process, run, steps)
    time.sleep(pause)
    kill(process)
    assert not (run / "summary.json").exists()
    finish(folder, "--resume", "runs/killed", **options)
    return run


def random_steps(low: int, high: int) -> int:
    """Draw a number of steps, which GRPOX_TESTS_SEED repeats."""
    seed = int(os.environ.get("GRPOX_TESTS_SEED", random.randrange(2**32)))
    print(f"killed at the moment of GRPOX_TESTS_SEED={seed}")
    return random.Random(seed).randrange(low, high)


def kill(process: Process) -> None:
    """Kill every process of it, at once."""
    for pid in process.pids:
        with suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for_steps(process: Process, run: Path, steps: int) -> bool:
    """Wait until the run has recorded so many steps; False if it ended before, or takes too long."""
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + patient(240)
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b'"metrics"') >= steps:
            return True
        time.sleep(0.01)
    return False


def recorded(run: Path) -> list[dict[str, Any]]:
    """Return the run's measurements, without those that depend on the machine and the moment."""
    lines = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        del told["time"]
        for kind in told.keys() - {"step"}:
            told[kind] = {name: v for name, v in told[kind].items() if not name.startswith(OF_THIS_MACHINE)}
        lines.append(told)
    return lines


def assert_same(run: Path, other: Path) -> None:
    """Compare metrics, completions, their tokens and weights, bit by bit."""
    import torch
    from pyarrow import parquet
    from safetensors.torch import load_file

    assert recorded(run) == recorded(other)
    for folder in ("completions", "tokens"):
        names = sorted(path.name for path in (run / folder).iterdir())
        assert names
        assert names == sorted(path.name for path in (other / folder).iterdir())
        for name in names:
            tables = [parquet.read_table(each / folder / name) for each in (run, other)]
            assert tables[0].equals(tables[1]), f"{folder}/{name}"
    weights = [load_file(each / "model" / "model.safetensors") for each in (run, other)]
    assert weights[0].keys() == weights[1].keys()
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
