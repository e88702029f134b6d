"""Runs of a sweep as processes: so many at a time, each with its own output, and none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpox.cli.doctor import gpu_count
from grpox.cli.sweep_children import Child

POLL = 0.2
"""Seconds between two looks at the processes."""
END_SECONDS = 60.0
"""How long runs that are told to end may take for their step and checkpoint before they are killed."""
_PDEATHSIG = 1
"""prctl's number for the signal that a process gets when its parent dies."""


@dataclass(frozen=True)
class Running:
    """A run whose process is there."""

    child: Child
    process: subprocess.Popen[bytes]
    slot: int
    """From 0 to the number that run at a time: those at the same time have different ones."""
    since: float
    """By time.monotonic."""


def run_all(
    children: Sequence[Child],
    command: Callable[[Child], Sequence[str]],
    environment: Mapping[str, str],
    parallel: int,
    ranks: int,
    started: Callable[[Child], object],
    watch: Callable[[Sequence[Running]], object],
    ended: Callable[[Child, int, float], object],
) -> None:
    """Run each of `children` to its end, `parallel` of them at a time.

    One that fails keeps no other from running. Where this is interrupted, those that run are told to end by
    SIGTERM, upon which they save a checkpoint, and are waited for.

    Args:
        ranks: of each, for the GPUs that it may use.
        started: told when a run begins.
        watch: told again and again which run.
        ended: told its exit code and seconds.
    """
    waiting, running = list(children), list[Running]()
    devices = _devices(parallel, ranks)
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                slot = min(set(range(parallel)) - {each.slot for each in running})
                child = waiting.pop(0)
                started(child)
                process = _start(child, command(child), {**environment, **devices[slot]})
                running.append(Running(child, process, slot, time.monotonic()))
            time.sleep(POLL)
            watch(running)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                ended(each.child, each.process.returncode, time.monotonic() - each.since)
    finally:
        _end(running)


def train_command(run: str, child: Child, ranks: int) -> list[str]:
    """`grpox train`, going on where an earlier one of the same folder came."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "grpox", "train", run, *child.overrides, "--resume", "auto"]


def _start(child: Child, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    child.log.parent.mkdir(parents=True, exist_ok=True)
    with child.log.open("ab") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C in the terminal comes to this process alone, which tells them once.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """In the new process: end it when this one is killed, so that the same command can be given again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


def _end(running: Sequence[Running]) -> None:
    for each in running:
        with contextlib.suppress(ProcessLookupError):
            # Not to its group: a launcher hands the signal on, and a second one would end a run at once.
            each.process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for each in running:
        try:
            each.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def _devices(parallel: int, ranks: int) -> list[dict[str, str]]:
    """Of each slot, which GPUs it is to see, where there are enough of them for all; else nothing."""
    if parallel == 1:
        return [{}]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = given.split(",") if given else [str(number) for number in range(gpu_count())]
    if len(there) < parallel * ranks:
        return [{} for _ in range(parallel)]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(there[slot * ranks : (slot + 1) * ranks])} for slot in range(parallel)
    ]


def last_lines(path: Path, most: int = 2) -> Iterator[str]:
    """The last lines of a log that say something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return
    yield from [line.strip() for line in lines if line.strip()][-most:]
