"""The processes of a run: rank, size, device, and the few collectives the core needs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from grpox import launch
from grpox.loopback import keep_to_loopback, loopback_store

Item = TypeVar("Item")


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """The items of every rank, in rank order, on every rank."""
        if self.size == 1:
            return list(items)
        gathered: list[list[Item]] = [[] for _ in range(self.size)]
        dist.all_gather_object(gathered, list(items))
        return [item for part in gathered for item in part]

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """`values` reduced over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=op)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def start_world(timeout: float = 1800.0) -> World:
    """Join (or form) the process group: gloo on CPU, nccl on CUDA.

    Under torchrun or the deepspeed launcher the environment tells rank and size; without one this process is
    a world of its own, which opens no port. DeepSpeed finds the group already made and joins it: left to
    itself it would pass a device id, with which weight sync was seen to hang.

    Args:
        timeout: seconds that a collective waits for the other ranks.
    """
    rank, size, local_rank = launch.rank(), launch.world_size(), launch.local_rank()
    # DeepSpeed insists on finding this variable, even without a launcher.
    os.environ.setdefault("LOCAL_RANK", "0")
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        keep_to_loopback()
        store = HashStore() if size == 1 else loopback_store(rank, size, limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        atexit.register(dist.destroy_process_group)
    return World(rank=rank, size=size, device=device)
