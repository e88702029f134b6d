"""Optimizer steps under ZeRO-3 with packed sequences, padded ones, and mixed samples; run alone or by torchrun.

Usage: packed_steps.py OUT.pt
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from zero3_step import (
    captured,
    config_for,
    engine_of,
    micro_batches_for,
    reference_for,
    save_results,
    update_of,
    well_conditioned,
)

from grpox.config import LoraConfig, RunConfig
from grpox.policy.attention import VARLEN
from grpox.policy.batch import Sample
from grpox.policy.engine import FrozenEngine
from grpox.policy.lora.add import add_adapters
from grpox.policy.models import load_model
from grpox.runtime.world import World
from grpox.update.packing import MicroBatchPacker

BUDGET = 24
"""Positions of a micro-batch: so few that ranks need other numbers of them."""
PLAIN: dict[str, Any] = {"chunked_logprobs": False, "skip_zero_advantage": False}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "packed": {"packed": True, "reference": True},
    "packed, checkpointing": {"packed": True, "gradient_checkpointing": True},
    "packed, a budget": {"packed": True, "max_tokens_per_micro_batch": BUDGET},
    "shared": {"packed": True, "prefix_sharing": True},
    "adapters, plain": PLAIN | {"adapters": True},
    "adapters, packed": {"packed": True, "adapters": True, "gradient_checkpointing": True},
    "first trial fails": {"broken": True},
}


def break_shared_rows(model: Any, world: World) -> None:
    """Let the last layer refuse rows that sequences share, in the midst of the forward pass."""
    body, layer = model.base_model, model.base_model.layers[-1]
    of_body, of_layer = body.forward, layer.forward
    masks: list[Any] = []

    def body_forward(*args: Any, attention_mask: Any = None, **inputs: Any) -> Any:
        masks[:] = [attention_mask]
        return of_body(*args, attention_mask=attention_mask, **inputs)

    def layer_forward(*args: Any, **inputs: Any) -> Any:
        if masks[0] is not None and masks[0].ndim == 4:
            raise RuntimeError(f"rank {world.rank} has no such mask")
        return of_layer(*args, **inputs)

    body.forward, layer.forward = body_forward, layer_forward


def step(config: RunConfig, world: World, changes: dict[str, Any]) -> dict[str, Any]:
    changes = dict(changes)
    names = ("packed", "adapters", "broken", "reference")
    is_packed, has_adapters, is_broken, has_reference = (changes.pop(name, False) for name in names)
    train = config.train.model_copy(update=changes)
    init = {"attn_implementation": VARLEN} if is_packed else {}
    chosen = config.model.model_copy(update={"init": init})
    config = config.model_copy(update={"train": train, "model": chosen})
    model = load_model(config.model)
    if has_adapters:
        add_adapters(model, LoraConfig(r=4, alpha=8), seed=0)
    if is_broken:
        break_shared_rows(model, world)
    engine = engine_of(config, world, model)
    gradients = captured(engine)
    reference = FrozenEngine(load_model(config.model), config, world) if has_reference else None
    metrics = update_of(engine, reference, config, world).step(micro_batches_for(config, world))
    return {
        "gradients": gradients[0],
        "metrics": metrics,
        "mode": asdict(engine.mode),
        "unused": world.gather([engine.unused_modes]),
        "of the reference": None if reference is None else asdict(reference.mode),
    }


def mixed(micro_batches: list[list[Sample]], world: World) -> list[list[Sample]]:
    """Give the first half of a step a pi_old and a reference, and have its last row twice."""
    every = [sample for samples in micro_batches for sample in samples]
    for sample in every[: len(every) // 2]:
        length = len(sample.completion)
        sample.old_logprobs = torch.linspace(-2.2, -1.8, length)
        sample.reference_logprobs = torch.full((length,), -2.0)
    if world.rank == world.size - 1:
        micro_batches[-1][-2] = micro_batches[-1][-1]
    return micro_batches


def mixed_steps(config: RunConfig, world: World) -> dict[str, Any]:
    """Take two steps on samples that differ in what is known of them."""
    engine = engine_of(config, world)
    gradients, update = captured(engine), update_of(engine, reference_for(config, world), config, world)
    micro_batches = mixed(micro_batches_for(config, world), world)
    alone = MicroBatchPacker(config.train, engine.mode, False, False, budget=BUDGET)
    own = len(alone.pack(micro_batches, World(0, 1, world.device))[0])
    metrics = [update.step(micro_batches) for _ in range(2)]
    every = [sample for samples in micro_batches for sample in samples]
    return {
        "gradients": gradients,
        "metrics": metrics,
        "micro-batches": world.gather([own]),
        "lacks": world.gather([sum(s.old_logprobs is None or s.reference_logprobs is None for s in every)]),
    }


def results(world: World) -> dict[str, Any]:
    config, of_mixed = (well_conditioned(config_for("dapo", beta, 6 // world.size, 4)) for beta in (0.0, 0.1))
    of_mixed.train.max_tokens_per_micro_batch = BUDGET
    found = {name: step(config, world, changes) for name, changes in CASES.items()}
    return found | {"mixed": mixed_steps(of_mixed, world)}


if __name__ == "__main__":
    save_results(results)
