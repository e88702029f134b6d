"""The reference policy: a model that follows the policy, or the policy itself with its adapters off.

Every `ref_sync_steps` steps ``ref <- alpha pi + (1 - alpha) ref``. Source: TR-DPO, "Learn your reference model
for real good alignment" (arXiv 2404.09656), soft update; with alpha 1 it is the paper's hard update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from grpox.config import TrainConfig
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.lora.layers import without_adapters
from grpox.policy.weight_stream import persistent_buffers


@torch.no_grad()
def sync_reference(policy: Engine, reference: FrozenEngine, config: TrainConfig) -> None:
    """Update the reference if `ref_sync_steps` optimizer steps have passed; a collective.

    One parameter is gathered at a time. Persistent buffers are updated too; integer and boolean buffers are
    copied from the policy.
    """
    if policy.steps % config.ref_sync_steps:
        return
    alpha = config.ref_sync_alpha
    from deepspeed import zero

    pairs = zip(policy.module.parameters(), reference.module.parameters(), strict=True)
    for source, target in pairs:
        # With a modifier rank, rank 0's values are sharded again over all ranks.
        with zero.GatheredParameters([source]), zero.GatheredParameters([target], modifier_rank=0):
            target.lerp_(source.to(target.dtype), alpha)
    buffers = zip(persistent_buffers(policy.module), persistent_buffers(reference.module), strict=True)
    for (_, ours), (_, theirs) in buffers:
        if theirs.is_floating_point():
            theirs.lerp_(ours.to(theirs.dtype), alpha)
        else:
            theirs.copy_(ours)


class BaseAsReference:
    """Forward passes of the policy's engine without adapters, instead of an `engine.FrozenEngine`.

    The model under the adapters is frozen, so no second model needs to be loaded.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.mode = engine.mode
        self.module: nn.Module = engine.module
        """The policy, including its adapters."""

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        with without_adapters(self.module):
            return self._engine(**inputs)
