"""One rank of weight_sync.py: seconds of its four ways in turns, then the memory that a sync takes.

Usage: weight_sync_rank.py ARGUMENTS.json OUT.json, by itself or under torchrun
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from memory_peak import MemoryPeak
from started import Started, start

from grpox.contracts import WeightStream

WARMUP = 2
"""Rounds before those that count."""
LOOKS = 3
"""Syncs whose memory is watched."""


def times(started: Started, weights: Callable[[], WeightStream], rounds: int) -> dict[str, list[float]]:
    """Seconds that each way takes until the last rank is done, round by round."""
    named, sync = list(weights()), started.generator.sync
    ways: dict[str, Callable[[], object]] = {
        "clone": lambda: [tensor.clone() for _, tensor in named],
        "gather": lambda: deque(weights(), maxlen=0),
        "take": lambda: sync(iter(named), 0),
        "sync": lambda: sync(weights(), 0),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _, (way, run) in itertools.product(range(WARMUP + rounds), ways.items()):
        started.world.barrier()
        begin = time.perf_counter()
        kept = run()
        if started.world.device.type == "cuda":
            torch.cuda.synchronize()
        started.world.barrier()
        seconds[way].append(time.perf_counter() - begin)
        del kept
    return {way: taken[WARMUP:] for way, taken in seconds.items()}


def memory(run: Callable[[], None], pids: Sequence[int] = ()) -> tuple[int, int]:
    """Bytes above where they began at the peak, the most of several runs: private, and in /dev/shm."""
    peaks = []
    for _ in range(LOOKS):
        with MemoryPeak(pids) as peak:
            run()
        peaks.append((peak.private, peak.shared))
    return max(private for private, _ in peaks), max(shared for _, shared in peaks)


def measure(started: Started, rounds: int, pid: int | None) -> dict[str, Any]:
    """All figures of this rank. A server's processes are those below `pid`."""
    weights = started.engine.weights
    figures: dict[str, Any] = {"model_bytes": sum(t.numel() * t.element_size() for _, t in weights())}
    figures |= times(started, weights, rounds)

    def sync() -> None:
        started.generator.sync(weights(), 0)

    figures["trainer_bytes"], figures["shared_bytes"] = memory(sync)
    if pid is not None:
        server = [process.pid for process in psutil.Process(pid).children(recursive=True)]
        figures["server_bytes"], _ = memory(sync, server)
    return figures


def main(arguments: str, out: str) -> None:
    given = json.loads(Path(arguments).read_text())
    started = start(given["run"], given["overrides"])
    try:
        figures = measure(started, given["rounds"], given["pid"])
    finally:
        started.generator.close()
    Path(f"{out}.{started.world.rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
