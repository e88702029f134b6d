"""Sets up a process before training or evaluation: seeds, quiet libraries, restored environment variables."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def seed_libraries(seed: int) -> None:
    """Seed every library of this process from which code may draw without a generator of its own."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def quieten() -> None:
    """Silence messages and progress bars of libraries, which would hide the run's; warnings stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _is_news(record: logging.LogRecord) -> bool:
    """Drop DeepSpeed's messages about a skipped step, which the run reports in more detail, and about leaf
    modules, of which a run with adapters has none."""
    message = record.getMessage()
    return "OVERFLOW!" not in message and "leaf module configuration did not match" not in message


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones, where training runs on a CPU.

    It would give each large block back to the system, and the system would fill each of its pages with zeros
    for the next tensor. Variables of the environment that set this, such as MALLOC_TRIM_THRESHOLD_, are obeyed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        for parameter in (-3, -1):  # the thresholds M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
            mallopt(parameter, 2**31 - 1)


@contextmanager
def one_processor_each() -> Iterator[None]:
    """Give each thread that first computes within the block one processor, for as long as it lives.

    gloo gathers in threads of its own. Each would keep OpenMP threads for its copies, and once a process has
    more OpenMP threads than processors, libgomp lets idle ones sleep instead of wait: then every parallel
    operation of the process begins by waking them, which takes longer than most of them do. This is left as it
    is where threads that wait would be in the way: where the ranks of the machine have more of them than
    processors, or where they would wait for milliseconds, because torch was loaded before grpox.
    """
    import torch

    number = torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    wait_briefly = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    if number == 1 or number * ranks > (os.cpu_count() or 1) or not wait_briefly:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


@contextmanager
def preserve_env(*names: str) -> Iterator[None]:
    """Restore these environment variables after the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
