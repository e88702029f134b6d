"""The shared memory in which vLLM's CPU build exchanges tensors between ranks, one run's apart from others'."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpox.contracts import GeneratorContext
from grpox_generators.ranks import same_on_all_ranks

SEGMENTS = Path("/dev/shm")


@contextmanager
def own_segments(context: GeneratorContext) -> Iterator[None]:
    """While an engine is started: name its segments after this run, and remove the names when all have them.

    With ranks that a launcher started, vLLM gives every run of a host the same names, and removes them when its
    process ends in good order: a run beside another, or after one that was killed, finds them taken. A segment
    without a name lives as long as a process uses it.
    """
    if context.world_size == 1 or context.device.type != "cpu":
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    run = f"grpox-{same_on_all_ranks(secrets.token_hex(4), context)}"
    of_vllm = _CPUSHMDistributed.make_group_name

    def of_this_run(communicator: Any) -> str:
        return f"{run}-{of_vllm(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(of_this_run)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(of_vllm)
        for segment in SEGMENTS.glob(f"{run}-*_{context.rank}"):  # each rank's own: all ranks have joined
            segment.unlink()
