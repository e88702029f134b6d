"""Mixes the policy into a reference under ZeRO-3; run alone or by torchrun.

Usage: reference_sync_step.py OUT PERSISTENCE_THRESHOLD...
Rank 3 writes OUT.3: for each threshold its results.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from zero3_step import config_for, engine_of, reference_for

from grpox.cli.errors import leave
from grpox.policy.reference import sync_reference
from grpox.policy.weight_stream import stream_weights
from grpox.runtime.world import World, start_world


def mixed(threshold: int, world: World) -> dict[str, Any]:
    """Mix twice, and return the reference before, after one step and after two."""
    config = config_for("dapo", 0.1, 6, 1)
    config.deepspeed.stage3_param_persistence_threshold = threshold
    config.train.ref_sync_alpha, config.train.ref_sync_steps = 0.25, 2
    train = config.train
    reference = reference_for(config, world)
    assert reference is not None
    engine = engine_of(config, world)
    snapshots = [snapshot(reference.module)]
    ids = torch.tensor([[3, 4, 5, 6]])
    for _ in range(2):
        engine.steps += 1  # the weights of the policy may as well stay as they are
        sync_reference(engine, reference, train)
        snapshots.append(snapshot(reference.module))
    logits = reference(input_ids=ids).logits
    return {
        "policy": dict(engine.weights()),
        "reference": snapshots,
        "logits": logits,
        "whole": any(parameter.ds_persist for parameter in reference.module.parameters()),
    }


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in stream_weights(module)}


def main(out: str, thresholds: list[str]) -> None:
    world = start_world()
    results = {threshold: mixed(int(threshold), world) for threshold in thresholds}
    torch.save(results, f"{out}.{world.rank}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    leave(0)
