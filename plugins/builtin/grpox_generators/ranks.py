"""Facts that generators exchange across the ranks of a run, and an engine that several ranks hold together.

Tensor parallelism: `size` ranks that follow one another hold one engine and ask it the same. Every rank runs a
scheduler of its own; they stay in step because each is given the same requests in the same order. Source:
vLLM's `ExecutorWithExternalLauncher`, as TRL uses it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from grpox.contracts import GeneratorContext

Item = TypeVar("Item")
SEGMENTS = Path("/dev/shm")


def from_all_ranks(item: Item, context: GeneratorContext) -> list[Item]:
    """Return each rank's `item`, in rank order; a collective."""
    items = [item] * context.world_size
    if context.world_size > 1:
        dist.all_gather_object(items, item)
    return items


def engine_arguments(size: int, world_size: int) -> dict[str, Any]:
    """Return the arguments that tell vLLM of the ranks.

    Without the external launcher it would take each rank for a world of its own, on the machine's first GPU.
    """
    if world_size == 1:
        return {}
    return {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}


def ask_together(mine: Sequence[Item]) -> tuple[list[Item], slice]:
    """Gather the requests of this rank's group in rank order, and which are `mine`; a collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return list(mine), slice(None)
    parts: list[list[Item]] = [[] for _ in range(group.world_size)]
    dist.all_gather_object(parts, list(mine), group=group.cpu_group)
    before = sum(len(part) for part in parts[: group.rank_in_group])
    return [request for part in parts for request in part], slice(before, before + len(mine))


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

    run = f"grpox-{from_all_ranks(secrets.token_hex(4), context)[0]}"
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
