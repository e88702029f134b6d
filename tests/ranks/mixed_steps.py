"""Two optimizer steps under ZeRO-3 whose samples differ in what is known of them; run alone or by torchrun.

Usage: mixed_steps.py OUT.pt
"""

from __future__ import annotations

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

from grpox.config import RunConfig
from grpox.policy.batch import Sample
from grpox.runtime.world import World
from grpox.update.packing import MicroBatchPacker

BUDGET = 24
"""Positions of a micro-batch: so few that ranks need other numbers of them."""


def mixed(micro_batches: list[list[Sample]], world: World) -> list[list[Sample]]:
    """Make the first half of a step one that was trained on before, and its last row one that is there twice.

    The row takes the place of the one before it.
    """
    every = [sample for samples in micro_batches for sample in samples]
    for sample in every[: len(every) // 2]:
        length = len(sample.completion)
        sample.old_logprobs = torch.linspace(-2.2, -1.8, length)
        sample.reference_logprobs = torch.full((length,), -2.0)
    if world.rank == world.size - 1:
        micro_batches[-1][-2] = micro_batches[-1][-1]
    return micro_batches


def steps(config: RunConfig, world: World) -> dict[str, Any]:
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
    config = well_conditioned(config_for("dapo", 0.1, 6 // world.size, 4))
    config.train.max_tokens_per_micro_batch = BUDGET
    return steps(config, world)


if __name__ == "__main__":
    save_results(results)
