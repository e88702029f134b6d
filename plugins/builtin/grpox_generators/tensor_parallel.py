"""Tensor parallelism over ranks: `size` ranks that follow one another hold one engine and ask it the same.

Every rank runs a scheduler of its own; they stay in step because each is given the same requests in the same
order. Source: vLLM's `ExecutorWithExternalLauncher`, as TRL uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from grpox.errors import ConfigError, Problem

Request = TypeVar("Request")


def check_size(size: int, world_size: int) -> None:
    """Refuse a group that the ranks cannot be dealt into.

    Raises:
        ConfigError: `size` does not divide `world_size`.
    """
    if world_size % size:
        what = "the ranks cannot be dealt into groups of this size"
        allowed = f"a divisor of the number of ranks, {world_size}"
        raise ConfigError(Problem(what, "generator.tensor_parallel_size", given=str(size), allowed=allowed))


def engine_arguments(size: int, world_size: int) -> dict[str, Any]:
    """What tells vLLM of the ranks.

    Without the external launcher it would take each rank for a world of its own, on the machine's first GPU.
    """
    if world_size == 1:
        return {}
    return {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}


def ask_together(mine: Sequence[Request]) -> tuple[list[Request], slice]:
    """What all ranks of this rank's group ask, in rank order, and which of it is `mine`; a collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return list(mine), slice(None)
    parts: list[list[Request]] = [[] for _ in range(group.world_size)]
    dist.all_gather_object(parts, list(mine), group=group.cpu_group)
    before = sum(len(part) for part in parts[: group.rank_in_group])
    return [request for part in parts for request in part], slice(before, before + len(mine))
