"""Real optimizer steps under ZeRO-3 on fixed rollouts, of each loss and of masks; run alone or by torchrun.

Usage: zero3_step.py OUT.pt BATCH_SIZExACCUMULATION...
"""

from __future__ import annotations

import importlib.resources
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad
from step_cases import STEPS
from transformers import PreTrainedModel

from grpox.cli.errors import leave
from grpox.config import RunConfig
from grpox.contracts import Rollout
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule, StepPlan
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import Sample, samples_of
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.models import load_model
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runtime.world import World, start_world
from grpox.update.policy_update import PolicyUpdate
from grpox.update.step_statistics import StepStatistics

ROWS = 24
MAX_LENGTH = 7
TERMS = {"entropy_coef": 0.1, "top_entropy_quantile": 0.3, "off_policy_mask_threshold": 0.4}
MASKED: dict[str, dict[str, Any]] = {
    "terms": TERMS,
    "terms, plain forward": TERMS | {"chunked_logprobs": False, "skip_zero_advantage": False},
}
"""Steps of dapo with an entropy bonus and both masks, and their settings."""
STATISTICS: Any = {
    (name, reduction): "a test"
    for name in ("ratio", "kl_old", "kl", "entropy", "advantages", "advantage", "length")
    for reduction in ("gather", "sum", "mean", "min", "max")
}


def rollouts() -> tuple[list[Rollout], list[float]]:
    """Ragged rollouts with one of a single token, and advantages of both signs and zero."""
    rng = random.Random(7)
    rows, advantages = [], []
    for row in range(ROWS):
        length = 1 if row == 5 else rng.randint(1, MAX_LENGTH)
        prompt = tuple(rng.randrange(3, 17) for _ in range(rng.randint(1, 6)))
        completion = tuple(rng.randrange(3, 17) for _ in range(length))
        rows.append(Rollout(row // 4, row % 4, prompt, completion, "length", 0))
        advantages.append(rng.choice([-1.3, -0.4, 0.0, 0.7, 1.9]))
    return rows, advantages


def config_for(loss: str, beta: float, batch_size: int, accumulation: int) -> RunConfig:
    model_path = str(importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model")
    return RunConfig.model_validate(
        {
            "model": {"path": model_path},
            "data": {"path": "unused.jsonl"},
            "rewards": ["exact"],
            "loss": loss,
            "train": {
                "per_device_train_batch_size": batch_size,
                "gradient_accumulation_steps": accumulation,
                "num_generations": 4,
                "beta": beta,
                "max_grad_norm": 0.5,
                "learning_rate": 1e-3,
            },
            "sampling": {"max_completion_length": MAX_LENGTH, "temperature": 0.8},
            # Under DeepSpeed's default nothing of a model this small would be partitioned at all.
            "deepspeed": {"stage3_param_persistence_threshold": 0},
        }
    )


def well_conditioned(config: RunConfig) -> RunConfig:
    """Return a config under which float32's rounding, another on each CPU, is seen as little as it can be.

    A sure model has logits that cancel in the gradient, and Adam's first step makes as much of a gradient of
    1e-8, which is rounding alone, as of any other.
    """
    train = config.train.model_copy(update={"adam_epsilon": 0.01})
    sampling = config.sampling.model_copy(update={"temperature": 2.5})
    return config.model_copy(update={"train": train, "sampling": sampling})


def reference_for(config: RunConfig, world: World) -> FrozenEngine | None:
    """A reference that differs from the policy, so that the KL term has something to do."""
    if config.train.beta == 0:
        return None
    model = load_model(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    return FrozenEngine(model, config, world)


def plan_of(config: RunConfig, world: World) -> StepPlan:
    plan = BatchPlan.from_config(config.train, world.size)
    sampler = PromptSampler(1000, plan.prompts_per_generation, shuffle=False, seed=0)
    (step,) = Schedule(plan, sampler, max_steps=1).steps()
    return step


def micro_batches_for(config: RunConfig, world: World, every: list[Sample] | None = None) -> list[list[Sample]]:
    """This rank's micro-batches of a step on the samples of all ranks, by default those of `rollouts`."""
    every = samples_of(*rollouts()) if every is None else every
    return [[every[row] for row in each.rank_rows(world.rank)] for each in plan_of(config, world).micro_batches]


def engine_of(
    config: RunConfig, world: World, model: PreTrainedModel | None = None, files: Any = None
) -> Engine:
    """The engine of a run, of the model that the config names unless another is given."""
    train = config.train
    model = load_model(config.model) if model is None else model
    return Engine(model, config, world, 10, AdamW(train), NamedSchedule(train), files)


def update_of(engine: Engine, reference: Any, config: RunConfig, world: World, **own: Any) -> PolicyUpdate:
    """The update of a run, with the loss and the correction that the config names."""
    registry = Registry(discover())
    loss, correction = (
        registry.build(registry.parse(kind, getattr(config, kind), kind)) for kind in ("loss", "correction")
    )
    return PolicyUpdate(engine, reference, own.pop("loss", loss), correction, config, world, **own)


def captured(engine: Engine) -> list[dict[str, torch.Tensor]]:
    """Let the engine leave the whole gradient of each of its steps in the list that is returned."""
    gradients: list[dict[str, torch.Tensor]] = []
    take_step = engine.step

    def capture_and_step(loss: torch.Tensor) -> torch.Tensor:
        named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        gradients.append({name: safe_get_full_grad(parameter).clone() for name, parameter in named})
        return take_step(loss)

    engine.step = capture_and_step  # type: ignore[method-assign]
    return gradients


def step(config: RunConfig, world: World, is_masked: bool = False) -> dict[str, Any]:
    """Take one step; returns the whole gradient, the metrics, the weights after it, and statistics.

    Args:
        is_masked: give each sample a mu that depends on its tokens alone, so that some are far from the policy.
    """
    config = well_conditioned(config)
    engine = engine_of(config, world)
    gradients, samples = captured(engine), micro_batches_for(config, world)
    for sample in (sample for each in samples for sample in each if is_masked):
        sample.sampler_logprobs = -2 - np.array(sample.completion, dtype=np.float32) / 10
    statistics = StepStatistics(STATISTICS if config.train.beta else {})
    update = update_of(engine, reference_for(config, world), config, world, statistics=statistics)
    metrics = update.step(samples)
    shards = [parameter.ds_tensor.numel() / parameter.ds_numel for parameter in engine.module.parameters()]
    return {
        "gradient": gradients[0],
        "metrics": metrics,
        "weights": dict(engine.weights()),
        "largest_shard": max(shards),
        "statistics": dict(statistics.reduce(plan_of(config, world), samples, world)),
    }


def numbers(split: str) -> tuple[int, int]:
    """Return batch size and accumulation of, for example, 6x4."""
    batch_size, accumulation = map(int, split.split("x"))
    return batch_size, accumulation


def save_results(results: Callable[..., Any]) -> None:
    """Save what `results` returns for the world and the other arguments into the first one, on rank 0; end."""
    world, (out, *arguments) = start_world(), sys.argv[1:]
    found = results(world, *arguments)
    if world.is_main:
        torch.save(found, out)
    leave(0)


def steps_of_split(split: str, world: World) -> dict[Any, Any]:
    found = {(loss, beta): step(config_for(loss, beta, *numbers(split)), world) for loss, beta in STEPS}
    config = config_for("dapo", 0.0, *numbers(split))
    for name, settings in MASKED.items():
        train = config.train.model_copy(update=settings)
        found[name] = step(config.model_copy(update={"train": train}), world, is_masked=True)
    return found


if __name__ == "__main__":
    save_results(lambda world, *splits: {split: steps_of_split(split, world) for split in splits})
