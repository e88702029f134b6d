"""Optimizer steps under ZeRO-3, one of which is not finite; run alone or by torchrun.

Usage: nonfinite_steps.py OUT.pt VARIANT...
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from engine_steps import variant
from zero3_step import engine_of, micro_batches_for, save_results, update_of

from grpox.config import RunConfig
from grpox.contracts import LossInputs, LossOutput, Reduction
from grpox.errors import RunFailed
from grpox.policy.batch import Sample
from grpox.runtime.world import World


class Reinforce:
    """-w A; if told to, with a root whose gradient at 0 is infinite, so that 0 times it is NaN."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    broken = False
    added = 0.0
    """Changes no gradient."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        difference = inputs.logprobs - inputs.old_logprobs
        loss = -difference.exp() * inputs.advantages + self.added
        return LossOutput(loss + 0 * difference.abs().sqrt() if self.broken else loss)


def infinite_loss(micro_batches: list[list[Sample]], loss: Reinforce, world: World) -> None:
    """An advantage that is NaN, in the last micro-batch of the last rank alone."""
    if world.rank == world.size - 1:
        micro_batches[-1][0].advantage = math.nan


def infinite_gradient(micro_batches: list[list[Sample]], loss: Reinforce, world: World) -> None:
    """A gradient that is NaN though the loss is none, on the last rank alone."""
    loss.broken = world.rank == world.size - 1


def infinite_value(micro_batches: list[list[Sample]], loss: Reinforce, world: World) -> None:
    """A loss that is infinite though its gradient is finite, on the last rank alone."""
    loss.added = math.inf if world.rank == world.size - 1 else 0.0


FAULTS = {"loss": infinite_loss, "gradient": infinite_gradient, "value": infinite_value}


def steps(config: RunConfig, world: World, fault: str) -> dict[str, Any]:
    """A step, another that is not finite (or none), and a third: what the engine is after that."""
    engine, loss = engine_of(config, world), Reinforce()
    update = update_of(engine, None, config, world, loss=loss)
    metrics = [update.step(micro_batches_for(config, world))]
    if fault != "none":
        micro_batches = micro_batches_for(config, world)
        FAULTS[fault](micro_batches, loss, world)
        metrics.append(update.step(micro_batches))
        loss.broken, loss.added = False, 0.0
    metrics.append(update.step(micro_batches_for(config, world)))
    named = list(engine.module.named_parameters())
    states = ("exp_avg", "exp_avg_sq")
    return {
        "metrics": metrics,
        "weights": dict(engine.weights()),
        "master": {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named},
        "moments": {
            f"{state} {name}": safe_get_full_optimizer_state(parameter, state).clone()
            for name, parameter in named
            for state in states
        },
        "learning rate": engine.learning_rate,
        "steps": engine.steps,
    }


def far(config: RunConfig, world: World) -> str:
    """Return the report of a step that is as long as float32 permits."""
    config = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": 5e37})})
    update = update_of(engine_of(config, world), None, config, world, loss=Reinforce())
    try:
        update.step(micro_batches_for(config, world))
    except RunFailed as error:
        return str(error)
    return ""


def results(world: World, *names: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        config = variant(name, 12 // world.size, 2)
        config.train.on_nonfinite = "skip"
        config.train.lr_scheduler_type = "linear"
        found[name] = {fault: steps(config, world, fault) for fault in ("none", *FAULTS)}
        found[name]["far"] = far(config, world)
    return found


if __name__ == "__main__":
    save_results(results)
