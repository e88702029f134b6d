"""Statistics of a real step under ZeRO-3, for each way to split its rows; run alone or by torchrun.

Usage: statistics_steps.py OUT.pt BATCH_SIZExACCUMULATION...
"""

from __future__ import annotations

from typing import Any

from zero3_step import (
    config_for,
    engine_of,
    micro_batches_for,
    numbers,
    reference_for,
    rollouts,
    save_results,
    update_of,
    well_conditioned,
)

from grpox.config import RunConfig
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.runtime.world import World
from grpox.update.step_statistics import StepStatistics

TOKENS = ("ratio", "kl_old", "kl", "entropy", "advantages")
COMPLETIONS = ("advantage", "length")
REDUCTIONS = ("gather", "sum", "mean", "min", "max")


def statistics_of(config: RunConfig, world: World) -> dict[str, Any]:
    """Take one step; returns its statistics, the lengths of its rows, and its metrics."""
    config = well_conditioned(config)
    engine = engine_of(config, world)
    wanted: Any = {(name, each): "a test" for name in (*TOKENS, *COMPLETIONS) for each in REDUCTIONS}
    statistics = StepStatistics(wanted)
    update = update_of(engine, reference_for(config, world), config, world, statistics=statistics)
    plan = BatchPlan.from_config(config.train, world.size)
    sampler = PromptSampler(1000, plan.prompts_per_generation, shuffle=False, seed=0)
    (step,) = Schedule(plan, sampler, max_steps=1).steps()
    samples = micro_batches_for(config, world)
    rows, _ = rollouts()
    metrics = update.step(samples)
    values = statistics.reduce(step, samples, world)
    return {"values": dict(values), "lengths": [len(row.completion_ids) for row in rows], "metrics": metrics}


def results(world: World, *splits: str) -> dict[str, Any]:
    return {split: statistics_of(config_for("dapo", 0.04, *numbers(split)), world) for split in splits}


if __name__ == "__main__":
    save_results(results)
