"""The reference policy in a checkpoint, where it follows the policy; else it is what the run file names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpox.checkpoint.rank_state import read_state
from grpox.checkpoint.shards import ShardFiles
from grpox.policy.weight_stream import persistent_buffers, stream_weights
from grpox.runtime.world import World

if TYPE_CHECKING:
    from grpox.update.policy_update import PolicyUpdate

REFERENCE = "reference.pt"


def write_reference(policy: PolicyUpdate, folder: Path, shards: ShardFiles, world: World) -> None:
    """Gather its weights and write them on rank 0, whole; a collective."""
    if policy.reference is None or policy.reference is None:
        return
    weights = {}
    for name, tensor in stream_weights(policy.reference.module):
        if world.is_main:
            weights[name] = tensor.to("cpu", copy=True)
    if world.is_main:
        shards.submit(weights, folder / REFERENCE)


@torch.no_grad()
def read_reference(policy: PolicyUpdate, folder: Path, world: World) -> None:
    """Put back what `write_reference` wrote; a collective."""
    from deepspeed import zero

    if policy.reference is None or policy.reference is None:
        return
    weights = read_state(folder / REFERENCE) if world.is_main else {}
    for name, parameter in policy.reference.module.named_parameters():
        # With a modifier rank the values that rank 0 leaves are sharded anew over all ranks.
        with zero.GatheredParameters([parameter], modifier_rank=0):
            if world.is_main:
                parameter.copy_(weights[name])
    for name, buffer in persistent_buffers(policy.reference.module):
        if world.is_main:
            buffer.copy_(weights[name])
        if world.size > 1:
            dist.broadcast(buffer, src=0)
