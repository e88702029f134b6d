"""Two optimizer steps under ZeRO-3 whose samples differ in what is known of them; run alone or by torchrun.

Usage: mixed_steps.py OUT.pt
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from zero3_step import config_for, micro_batches_for, reference_for, well_conditioned

from grpox.cli.errors import leave
from grpox.config import RunConfig
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import Sample
from grpox.policy.engine import Engine
from grpox.policy.models import load_model
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runtime.world import World, start_world
from grpox.update.packing import MicroBatchPacker
from grpox.update.policy_update import PolicyUpdate

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


def steps(config: RunConfig, registry: Registry, world: World) -> dict[str, Any]:
    train = config.train
    engine = Engine(load_model(config.model), config, world, 10, AdamW(train), NamedSchedule(train))
    gradients: list[dict[str, torch.Tensor]] = []
    take_step = engine.step

    def capture_and_step(loss: torch.Tensor) -> torch.Tensor:
        named = engine.module.named_parameters()
        gradients.append({name: safe_get_full_grad(parameter).clone() for name, parameter in named})
        return take_step(loss)

    engine.step = capture_and_step  # type: ignore[method-assign]
    loss = registry.build(registry.parse("loss", config.loss, "loss"))
    correction = registry.build(registry.parse("correction", config.correction, "correction"))
    update = PolicyUpdate(engine, reference_for(config, world), loss, correction, config, world)
    micro_batches = mixed(micro_batches_for(config, world), world)
    alone = MicroBatchPacker(train, engine.mode, False, False, budget=BUDGET)
    own = len(alone.pack(micro_batches, World(0, 1, world.device)).micro_batches)
    metrics = [update.step(micro_batches) for _ in range(2)]
    every = [sample for samples in micro_batches for sample in samples]
    return {
        "gradients": gradients,
        "metrics": metrics,
        "micro-batches": world.gather([own]),
        "lacks": world.gather([sum(s.old_logprobs is None or s.reference_logprobs is None for s in every)]),
    }


def main(out: str) -> None:
    world = start_world()
    config = well_conditioned(config_for("dapo", 0.1, 6 // world.size, 4))
    config.train.max_tokens_per_micro_batch = BUDGET
    results = steps(config, Registry(discover()), world)
    if world.is_main:
        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
