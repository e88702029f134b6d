"""The verdict on a memory plan: a run's ranks fit a machine, or a GPU of a given size, or they do not."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from grpox.errors.formatting import format_bytes, pluralize
from grpox.policy.memory_plan.formula import Setting, parts_of, peak_of

Answer = Literal["fits", "tight", "does not fit"]
ANSWERS: Sequence[Answer] = ("fits", "tight", "does not fit")
"""From the best to the worst. Tight: the counted parts fit, but not together with the uncounted memory."""
OF_RANK = 2**30
"""Bytes of host memory for Python and its libraries, which the formula does not count."""
OF_GPU, FRAGMENTS = 2 * 2**30, 0.1
"""Uncounted memory of a GPU: bytes for CUDA's context and libraries, and the fraction for fragmentation."""
CGROUP = Path("/sys/fs/cgroup")
_QUERY = ("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")


class Memory(NamedTuple):
    """Bytes of a host or GPU."""

    free: int
    total: int


@dataclass(frozen=True)
class Line:
    """The verdict on one kind of memory."""

    where: str
    ranks: int
    counted: int
    """Bytes by the formula, in the phase with the most."""
    phase: str
    needed: int
    """The same, plus the memory that the formula does not count."""
    memory: Memory

    @property
    def answer(self) -> Answer:
        if self.counted > self.memory.free:
            return "does not fit"
        return "tight" if self.needed > self.memory.free else "fits"

    def __str__(self) -> str:
        free, total = format_bytes(self.memory.free), format_bytes(self.memory.total)
        place = f"{free} of {total} are free" if free != total else f"there are {total}"
        counted, needed = format_bytes(self.counted), format_bytes(self.needed)
        return (
            f"{self.where}, {pluralize(self.ranks, 'rank')}: {counted} during {self.phase}, {needed} with what "
            f"is not counted; {place}: {self.answer}"
        )


def verdict_lines(
    setting: Setting, on_cpu: Setting, host: Memory | None, gpus: Sequence[Memory]
) -> Iterator[Line]:
    """Compare the memory of a run's ranks with a machine, kind by kind.

    Args:
        setting: ranks with a GPU.
        on_cpu: the same ranks without one, for a machine without GPUs.
        host: memory that its ranks share; None: it is not judged.
    """
    # A run takes the first GPUs, one for each rank; further ranks run on other machines.
    used = gpus[: setting.ranks]
    if used:
        peak = peak_of(parts_of(setting), on_host=False)
        needed = int(peak.size * (1 + FRAGMENTS)) + OF_GPU
        yield Line("each GPU", 1, peak.size, peak.phase, needed, min(used))
    if host is not None:
        ranks = len(used) or on_cpu.ranks
        peak = peak_of(parts_of(setting if used else on_cpu), on_host=True)
        counted = peak.size * ranks
        yield Line("host", ranks, counted, peak.phase, counted + OF_RANK * ranks, host)


def worst_of(lines: Sequence[Line]) -> Answer:
    """Return the worst answer, which is the answer for the whole run."""
    return max((line.answer for line in lines), key=ANSWERS.index)


def host_here() -> Memory:
    """Read the free and total memory of this host, or of its container."""
    kernel = psutil.virtual_memory()
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or "max"
        return Memory(kernel.available, kernel.total)
    # The kernel gives up cached files before the limit is reached.
    free = min(kernel.available, limit - used + int(stat.get("inactive_file", 0)))
    return Memory(max(free, 0), limit) if limit < kernel.total else Memory(kernel.available, kernel.total)


def gpus_here() -> list[Memory]:
    """Ask the driver for the memory of the GPUs that a run may use; none if it does not answer."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True)
        rows = [[int(number) * 2**20 for number in line.split(",")] for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    gpus = [Memory(*row) for row in rows if len(row) == 2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        return gpus[: len(names)]  # ids of GPUs choose as many as there are
    # As in CUDA, the first number without a GPU, such as -1, ends the list.
    return [gpus[number] for number in takewhile(lambda each: 0 <= each < len(gpus), map(int, names))]
