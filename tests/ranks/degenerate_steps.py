"""Optimizer steps under ZeRO-3 that teach nothing, for every loss; run alone or by torchrun.

Usage: degenerate_steps.py OUT.pt
"""

from __future__ import annotations

from typing import Any

import torch
from step_cases import CASES, ROWS, STEPS, MicroBatch
from zero3_step import config_for, engine_of, reference_for, save_results, update_of

from grpox.contracts import Rollout
from grpox.policy.batch import Sample, samples_of
from grpox.runtime.world import World


def samples_for(micro_batch: MicroBatch) -> list[Sample]:
    """The rollouts of a micro-batch, of which those that were cut off are out of the loss."""
    lengths, advantages, truncated = micro_batch
    made = [
        Rollout(0, n, (3, 4, 5)[: n % 3 + 1], (6, 7, 8, 9)[:length], "length" if truncated else "stop", 0)
        for n, length in enumerate(lengths)
    ]
    return samples_of(made, advantages, truncated)


def steps(loss_name: str, beta: float, world: World) -> dict[str, Any]:
    """Two steps on each case: each one's metrics, and whether any weight has changed."""
    config = config_for(loss_name, beta, ROWS, 2 // world.size)
    engine = engine_of(config, world)
    update = update_of(engine, reference_for(config, world), config, world)
    before = {name: weight.clone() for name, weight in engine.weights()}
    results = {}
    for case in CASES:
        micro_batches = [samples_for(each) for each in CASES[case][world.rank :: world.size]]
        metrics = [update.step(micro_batches) for _ in range(2)]
        changed = [name for name, weight in engine.weights() if not torch.equal(weight, before[name])]
        results[case] = {"metrics": metrics, "changed": changed}
    return results


def results(world: World) -> dict[Any, Any]:
    return {(loss, beta): steps(loss, beta, world) for loss, beta in STEPS}


if __name__ == "__main__":
    save_results(results)
