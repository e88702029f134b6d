"""The phases of a step: the current phase, the seconds of each, and the phase in which memory ran out.

The message about lack of memory names the phase, the amount requested, and the settings to lower.
"""

from __future__ import annotations

import errno
import re
import resource
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

from grpox.errors import GrpoxError, RunFailed, chain, text_of
from grpox.errors.formatting import format_bytes
from grpox.runtime import launch
from grpox.runtime.logs import get_logger

TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "No available memory for the cache blocks",
    "less than desired GPU memory utilization",
    "is less than requested memory for kv",
)
"""Texts of libraries' out-of-memory errors that have no special type."""

_OFFLOAD = "deepspeed.offload_param and deepspeed.offload_optimizer (cpu or nvme), more ranks"
_GENERATOR = "{generator}"
SETTINGS = {
    "load": "model.dtype: bfloat16, train.beta: 0 (no reference model)",
    "shard": "model.dtype: bfloat16, train.beta: 0 (no reference model), a smaller model (every rank holds the "
    f"whole model until it is sharded); for memory after sharding: {_OFFLOAD}",
    "start generator": f"{_GENERATOR}{_OFFLOAD}",
    "restore": _OFFLOAD,
    "sync": f"{_GENERATOR}{_OFFLOAD}",
    "generate": f"{_GENERATOR}sampling.max_completion_length, train.steps_per_generation; in an evaluation "
    "evaluation.batch_size",
    "reward": "a reward model's batch_size, train.steps_per_generation",
    "gather": "sampling.max_completion_length, train.steps_per_generation",
    "update": "train.max_tokens_per_micro_batch, train.per_device_train_batch_size (with more "
    "train.gradient_accumulation_steps), sampling.max_completion_length, train.gradient_checkpointing: true, "
    "deepspeed.offload_optimizer: cpu",
    "checkpoint": "checkpoint.background: false (makes no copy)",
}
"""Phase -> settings that reduce its memory; a placeholder stands for the generator's settings."""

logger = get_logger(__name__)
WAITING = "gather"
"""The phase in which a rank waits for the others."""


def _out_of_memory(error: Exception, phase: str, generator: str) -> RunFailed:
    """Return the error with phase, rank and the settings to lower, among them those of the generator."""
    message = f"out of memory on rank {launch.rank()} in phase '{phase}': {_requested(error)}"
    message += f"\n    in use: {_in_use()}"
    if phase in SETTINGS:
        settings = SETTINGS[phase].replace(_GENERATOR, f"{generator}, " if generator else "")
        message += f"\n    to reduce it: {settings}"
    # Release the memory of the ended calls, because reporting the failure needs memory too.
    for each in chain(error, with_contexts=True):
        traceback.clear_frames(each.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return RunFailed(message)


def ran_out_of_memory(raised: BaseException) -> bool:
    """Return True if `raised`, or its cause, is lack of memory that is not yet reported as such."""
    for error in chain(raised):
        if isinstance(error, RunFailed) and str(error).startswith("out of memory"):
            return False
        is_error = isinstance(error, MemoryError | torch.OutOfMemoryError)
        is_error |= isinstance(error, OSError) and error.errno == errno.ENOMEM
        is_library = isinstance(error, RuntimeError | ValueError)
        if is_error or (is_library and any(text in text_of(error) for text in TEXTS)):
            return True
    return False


def _requested(error: Exception) -> str:
    """Return how much was requested if the library says so, else the library's message."""
    text = " ".join(text_of(error).split())
    if match := re.search(r"you tried to allocate (\d+) bytes", text):
        return f"{format_bytes(int(match[1]))} more were requested"
    if match := re.search(r"CUDA out of memory\. (.*?) (?:Process|Of the|Including)", text):
        return match[1]
    message = text if isinstance(error, GrpoxError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    return message[:600]


def _in_use() -> str:
    process, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    available, installed = format_bytes(machine.available), format_bytes(machine.total)
    used = f"{format_bytes(process.rss)} by this process, {available} of {installed} free"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used += f", address space {format_bytes(process.vms)} of the {format_bytes(limit)} allowed"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used += f"; on the GPU {format_bytes(torch.cuda.memory_allocated())} by this process, "
        used += f"{format_bytes(free)} of {format_bytes(total)} free"
    return used


@dataclass
class PeakMemory:
    """Highest memory in use since the last `take`: of this rank's GPU, or of this process on a CPU.

    On a GPU it includes what torch's own statistics leave out, such as the pool in which a vLLM engine keeps
    weights and cache, and other processes on the same GPU. `look` is called where much is in use.
    """

    most: int = 0
    """Most bytes of the GPU in use at a call of `look`."""

    def look(self) -> None:
        """Compare the memory of now; does not wait for the GPU."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.most = max(self.most, total - free)

    def take(self) -> int:
        """Return the peak in bytes and start again; on a CPU the peak since the process began."""
        self.look()
        if torch.cuda.is_available():
            most = max(self.most, torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
            self.most = 0
            return most
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class PhaseTimes:
    """Wall-clock seconds of each phase since the last `take`, the current phase, and the peak of memory."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    generator: str = ""
    """Settings that reduce the memory of the run's generator, for messages."""
    memory: PeakMemory = field(default_factory=PeakMemory)
    failed: str = "none"
    """The phase in which the last exception was raised."""
    _error: BaseException | None = None
    _now: tuple[str, float] = field(default_factory=lambda: ("between phases", time.perf_counter()))
    """One tuple, so that another thread reads consistent values."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, around = time.perf_counter(), self._now[0]
        self._now = name, start
        try:
            try:
                yield
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                raise _out_of_memory(error, name, self.generator) from error
        except BaseException as error:
            if error is not self._error:  # otherwise it comes from a phase within this one
                self.failed, self._error = name, error
            raise
        finally:
            end = time.perf_counter()
            self.seconds[name] += end - start
            logger.debug("phase %s took %.3f s", name, end - start)
            self._now = around, end

    def now(self) -> tuple[str, float]:
        """Current phase, and the time of the last begin or end of it or a phase within it, by perf_counter."""
        return self._now

    def touch(self) -> None:
        """Count the current phase as begun now."""
        self._now = self._now[0], time.perf_counter()

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase as metrics ``time/<phase>``, and start counting again."""
        metrics = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return metrics
