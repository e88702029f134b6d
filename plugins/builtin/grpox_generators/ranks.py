"""Exchange between the ranks of a run, and an engine that several ranks share.

With tensor parallelism, `size` consecutive ranks share one engine. Every rank runs its own scheduler; the
schedulers stay in step because all get the same requests in the same order. Source: vLLM's
`ExecutorWithExternalLauncher`, as TRL uses it.
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
    """Return the arguments that describe the ranks to vLLM.

    Without the external launcher, vLLM would treat each rank as a separate world on the machine's first GPU.
    """
    if world_size == 1:
        return {}
    return {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}


def ask_together(mine: Sequence[Item]) -> tuple[list[Item], slice]:
    """Return the requests of this rank's group in rank order, and the slice of `mine`; a collective."""
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
    """Name the engine's shared memory segments after this run, and remove the names when all ranks have opened
    them.

    If a launcher started the ranks, vLLM uses the same names for every run on a host, and removes them only
    when
    its process ends normally. A run beside another, or after a killed one, then finds the names in use. A
    segment without a name exists as long as a process uses it.
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
