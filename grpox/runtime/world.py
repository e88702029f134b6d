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

from grpox.errors import ConfigError, Problem
from grpox.runtime import launch
from grpox.runtime.launchers import Place
from grpox.runtime.rendezvous import meeting_store, name_interface, not_met

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

    The launcher's variables tell rank and size (`grpox.runtime.launch`); without one this process is a world of
    its own, which opens no port. DeepSpeed finds the group already made and joins it: left to itself it would
    pass a device id, with which weight sync was seen to hang.

    Args:
        timeout: seconds that a collective waits for the other ranks.

    Raises:
        ConfigError: what the launcher tells is not whole, contradicts itself, or needs more GPUs than exist.
        RunFailed: the ranks did not meet.
    """
    place = launch.settle()
    # DeepSpeed insists on finding this variable, even without a launcher.
    os.environ.setdefault("LOCAL_RANK", "0")
    device = _device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # By this DeepSpeed chooses the device, as vLLM does.
        os.environ["LOCAL_RANK"] = str(device.index)
    if not dist.is_initialized():
        _meet(place, device, timedelta(seconds=timeout))
        atexit.register(dist.destroy_process_group)
    return World(rank=place.rank, size=place.world_size, device=device)


def _meet(place: Place, device: torch.device, limit: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    name_interface(place)
    store = HashStore() if place.world_size == 1 else meeting_store(place, limit)
    try:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit
        )
    except RuntimeError as error:
        if place.world_size == 1:
            raise
        raise not_met(place, error) from error


def _device(place: Place) -> torch.device:
    """This rank's GPU, by its number on this machine; or the only one that it is shown, as srun may have it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_rank < count:
        return torch.device("cuda", place.local_rank)
    if count == 1 and place.launcher in ("srun", "mpirun"):
        return torch.device("cuda", 0)
    what = f"{place.launcher} started more processes on this machine than it has GPUs"
    given, allowed = str(place.local_rank), f"a number below {count}: one process for each GPU"
    raise ConfigError(Problem(what, key="LOCAL_RANK", given=given, allowed=allowed))
