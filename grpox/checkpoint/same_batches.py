"""Whether two sets of batch sizes train on the same prompts in the same steps, and which sizes would."""

from __future__ import annotations

from math import gcd
from typing import Any

from grpox.config import TrainConfig
from grpox.data.schedule import BatchPlan
from grpox.errors import Problem
from grpox.errors.formatting import counted

SPLITS = (
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.steps_per_generation",
    "train.generation_batch_size",
)
"""Keys that say how batches are split over ranks and micro-batches."""


def plan_of(config: dict[str, Any], world_size: int) -> BatchPlan:
    """The plan of a resolved config as a checkpoint holds it."""
    return BatchPlan.from_config(TrainConfig.model_validate(config["train"]), world_size)


def same_steps(saved: BatchPlan, plan: BatchPlan) -> bool:
    """Whether every optimizer step has the same rows under both, however they are split."""
    return _over_all_ranks(saved) == _over_all_ranks(plan)


def other_batches(saved: BatchPlan, plan: BatchPlan) -> Problem:
    """Why a run with `plan` does not go on where one with `saved` was, and what would."""
    ranks = counted(plan.world_size, "rank")
    what = f"{ranks} would make other batches than the {saved.world_size} of the checkpoint"
    if saved.world_size == plan.world_size:
        what = "the batches are not those of the checkpoint"
    return Problem(
        what,
        " and ".join(SPLITS[:3]),
        given=_told(plan),
        allowed=f"{_told(saved)}: {fitting(saved, plan.world_size)}",
    )


def fitting(saved: BatchPlan, world_size: int) -> str:
    """The settings by which `world_size` ranks take the steps of `saved`: as overrides of the command line."""
    both = gcd(saved.train_batch_size, saved.generation_batch_size)
    if both % world_size:
        sizes = [size for size in range(1, both + 1) if both % size == 0]
        return f"{world_size} ranks cannot share them evenly; {', '.join(map(str, sizes[:12]))} can"
    most = both // world_size
    # The largest micro-batch that is known to fit into memory.
    rows = max(size for size in range(1, saved.per_device_train_batch_size + 1) if most % size == 0)
    settings = (rows, saved.train_batch_size // (rows * world_size))
    generation = saved.generation_batch_size // (rows * world_size)
    named = zip(SPLITS[:3], (*settings, generation), strict=True)
    return " ".join([*(f"{key}={value}" for key, value in named), f"{SPLITS[3]}=null"])


def _over_all_ranks(plan: BatchPlan) -> tuple[int, ...]:
    return plan.train_batch_size, plan.generation_batch_size, plan.num_generations, plan.num_iterations


def _told(plan: BatchPlan) -> str:
    return (
        f"{plan.train_batch_size} completions a step, {plan.generation_batch_size} a generation batch, "
        f"groups of {plan.num_generations}, {plan.num_iterations} iterations"
    )
