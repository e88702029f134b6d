"""The verdict on a memory plan: a run's ranks fit a machine, or a GPU of a given size, or they do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from grpox.errors.formatting import format_bytes, pluralize
from grpox.policy.memory_plan.formula import Setting, parts_of, peak_of

Answer = Literal["fits", "tight", "does not fit"]
ANSWERS: Sequence[Answer] = ("fits", "tight", "does not fit")
"""From the best to the worst. Tight: the counted parts fit, but not with what is not counted."""
OF_RANK = 2**30
"""Bytes of host memory for Python and its libraries, which the formula does not count."""
OF_GPU, FRAGMENTS = 2 * 2**30, 0.1
"""Bytes of a GPU for CUDA's context and libraries, and the fraction for fragmentation, not counted either."""
CGROUP = Path("/sys/fs/cgroup")
_QUERY = ("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Memory:
    """Bytes of a host or GPU."""

    free: int
    total: int


@dataclass(frozen=True)
class Machine:
    """Memory of this machine; without GPUs the ranks are processes on its CPU."""

    host: Memory
    gpus: tuple[Memory, ...] = ()


@dataclass(frozen=True)
class Line:
    """The verdict on one kind of memory."""

    where: str
    ranks: int
    counted: int
    """Bytes by the formula, in the phase with the most."""
    phase: str
    needed: int
    """The same with what the formula does not count."""
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
    setting: Setting, on_cpu: Setting, machine: Machine, gpu: Memory | None = None
) -> Iterator[Line]:
    """Compare the memory of a run's ranks with a machine, kind by kind.

    Args:
        setting: ranks with a GPU.
        on_cpu: the same ranks without one.
        gpu: judge a GPU of this size instead of this machine.
    """
    if gpu is None and not machine.gpus:
        yield _of_host(on_cpu, on_cpu.ranks, machine.host)
        return
    peak = peak_of(parts_of(setting), on_host=False)
    # A run takes the first GPUs, one for each rank; further ranks run on other machines.
    used = machine.gpus[: setting.ranks]
    worst = min(used, key=lambda each: each.free) if gpu is None else gpu
    needed = int(peak.size * (1 + FRAGMENTS)) + OF_GPU
    yield Line("each GPU", 1, peak.size, peak.phase, needed, worst)
    if gpu is None:
        yield _of_host(setting, len(used), machine.host)


def _of_host(setting: Setting, ranks: int, memory: Memory) -> Line:
    peak = peak_of(parts_of(setting), on_host=True)
    counted = peak.size * ranks
    return Line("host", ranks, counted, peak.phase, counted + OF_RANK * ranks, memory)


def worst_of(lines: Sequence[Line]) -> Answer:
    """Return the worst answer, which is that of the whole."""
    return max((line.answer for line in lines), key=ANSWERS.index)


def this_machine() -> Machine:
    """Read the free and total memory of the host, or of its container, and of its GPUs."""
    free, total = _of_kernel()
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:
        # The kernel gives up cached files before the limit is reached.
        free, total = min(free, limit - (used or 0) + _cached_files()), limit
    return Machine(Memory(max(free, 0), total), tuple(gpus_here(os.environ)))


def _of_kernel() -> tuple[int, int]:
    """Return the available and the total bytes of memory; without Linux's list both are the total."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return total, total
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    available = rows.get("MemAvailable", "").split()
    return (int(available[0]) * 1024 if available else total), total


def _cached_files() -> int:
    """Return the bytes of a container's memory that hold files which are not in use."""
    try:
        rows = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(rows["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def gpus_here(environment: Mapping[str, str]) -> list[Memory]:
    """Ask the driver for the memory of the GPUs that a run may use; none if it does not answer."""
    if shutil.which(_QUERY[0], path=environment.get("PATH")) is None:
        return []
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True)
        rows = [[int(number) * 2**20 for number in line.split(",")] for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    gpus = [Memory(*row) for row in rows if len(row) == 2]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        return gpus[: len(names)]  # ids of GPUs choose as many as there are
    # As CUDA has it, the first number without a GPU, such as -1, ends the list.
    return [gpus[number] for number in takewhile(lambda each: 0 <= each < len(gpus), map(int, names))]
