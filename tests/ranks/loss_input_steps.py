"""Real optimizer steps under ZeRO-3 with losses that need more inputs; run alone or by torchrun.

Usage: loss_input_steps.py OUT.pt BATCH_SIZExACCUMULATION...
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import needy_losses
import numpy as np
import torch
import zero3_step
from lora_step import plain_model

from grpox.config import ComponentRef, LoraConfig, RunConfig
from grpox.contracts import Rollout
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import Sample, samples_of
from grpox.policy.engine import FrozenEngine
from grpox.policy.lora.add import add_adapters
from grpox.policy.models import load_model
from grpox.policy.reference import BaseAsReference
from grpox.runtime.world import World
from grpox.update.objective import StepLoss
from grpox.update.policy_update import PolicyUpdate

GROUP = 4
ROWS = 24
MAX_LENGTH = 7
TEMPERATURE = 2.5
SHRINK = 0.97
"""Factor of the reference's weights."""
PACKINGS: dict[str, dict[str, Any]] = {
    "regrouped": {},
    "scheduled": {"prefix_sharing": False},
    "all logits": {"chunked_logprobs": False, "prefix_sharing": False},
    "budget": {"max_tokens_per_micro_batch": GROUP * (6 + MAX_LENGTH)},
    "budget without sharing": {"max_tokens_per_micro_batch": GROUP * (6 + MAX_LENGTH), "prefix_sharing": False},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("ReferenceKl", {}),
    "beta": ("Plain", {"beta": needy_losses.COEFFICIENT}),
    "entropy": ("EntropyRegularised", {}),
    "entropy, all logits": ("EntropyRegularised", {"chunked_logprobs": False}),
    "bonus": ("Plain", {"entropy_coef": needy_losses.COEFFICIENT}),
    "rewards": ("RewardWeighted", {}),
    **{f"pairs, {name}": ("Pairwise", settings) for name, settings in PACKINGS.items()},
}
"""Name of a step -> its loss and settings; every step starts from the same weights."""
FEWER = (
    "reference",
    "beta",
    "entropy",
    "bonus",
    "rewards",
    "pairs, regrouped",
    "pairs, budget without sharing",
)
"""The steps of all splits but the first."""


def rollouts() -> tuple[list[Rollout], list[float], np.ndarray]:
    """Groups of four ragged rollouts of one prompt, with advantages and rewards f32[N, 2]."""
    rng = random.Random(11)
    rows, advantages, rewards = [], [], []
    for row in range(ROWS):
        if row % GROUP == 0:
            prompt = tuple(rng.randrange(3, 17) for _ in range(rng.randint(1, 6)))
        # The groups of the first half are long, so that ranks differ in their micro-batches under a budget.
        length = MAX_LENGTH if row < ROWS // 2 else rng.randint(1, 2)
        completion = tuple(rng.randrange(3, 17) for _ in range(length))
        rows.append(Rollout(row // GROUP, row % GROUP, prompt, completion, "stop", 0))
        advantages.append(0.0 if row // GROUP == 3 else rng.choice([-1.3, 0.0, 0.7]))
        rewards.append([rng.choice([0.0, 0.5, 1.0]), rng.random()])
    return rows, advantages, np.array(rewards, np.float32)


def samples() -> list[Sample]:
    """The rows of all ranks, each with its rewards and numbers."""
    rows, advantages, rewards = rollouts()
    of_all = samples_of(rows, advantages)
    of_all[9].token_mask[:] = False
    for row, sample in enumerate(of_all):
        sample.rewards, sample.group_id, sample.sequence_id = rewards[row], row // GROUP, row
    return of_all


def micro_batches_for(config: RunConfig, world: World) -> list[list[Sample]]:
    plan = BatchPlan.from_config(config.train, world.size)
    sampler = PromptSampler(1000, plan.prompts_per_generation, shuffle=False, seed=0)
    (step,) = Schedule(plan, sampler, max_steps=1).steps()
    of_all = samples()
    return [[of_all[row] for row in each.rank_rows(world.rank)] for each in step.micro_batches]


def config_for(split: str, settings: dict[str, Any]) -> RunConfig:
    config = zero3_step.config_for("dapo", 0.0, *zero3_step.numbers(split))
    config = config.model_copy(update={"train": config.train.model_copy(update=settings)})
    sampling = config.sampling.model_copy(update={"temperature": TEMPERATURE})
    return config.model_copy(update={"sampling": sampling})


def reference_model(config: RunConfig) -> Any:
    model = load_model(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHRINK)
    return model


def step(name: str, split: str, world: World) -> dict[str, Any]:
    """Take one step; returns the whole gradient, the metrics, and what the loss saw of groups."""
    loss_name, settings = CASES[name]
    config, train = config_for(split, settings), config_for(split, settings).train
    update, loss = update_of(config, loss_name, world, load_model(config.model))
    gradients = zero3_step.captured(update.engine)
    metrics = update.step(micro_batches_for(config, world))
    sizes = world.gather(getattr(loss, "sizes", []))
    assert train.beta == 0 or update.reference is not None
    return {"gradient": gradients[0], "metrics": metrics, "sizes": sizes}


def update_of(
    config: RunConfig, loss_name: str, world: World, model: Any, lora: bool = False
) -> tuple[PolicyUpdate, Any]:
    registry = Registry(discover())
    path = f"{Path(needy_losses.__file__)}:{loss_name}"
    bound = registry.parse("loss", ComponentRef(path=path), "loss")
    loss = registry.build(bound)
    correction = registry.build(registry.parse("correction", config.correction, "correction"))
    needs_reference = StepLoss.of(loss, correction, config.train, bound.needs).needs_reference
    reference: Any = None
    if needs_reference and not lora:
        reference = FrozenEngine(reference_model(config), config, world)
    engine = zero3_step.engine_of(config, world, model)
    if needs_reference and lora:
        reference = BaseAsReference(engine)
    return PolicyUpdate(engine, reference, loss, correction, config, world, needs=bound.needs), loss


def lora_step(name: str, split: str, world: World) -> dict[str, Any]:
    """Take a step of adapters that are not zero; returns the gradient and the reference's log-probabilities."""
    loss_name, settings = CASES[name]
    config = config_for(split, settings)
    model = plain_model()
    add_adapters(model, LoraConfig(r=4, alpha=8, target_modules="all-linear"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    update, _ = update_of(config, loss_name, world, model, lora=True)
    gradients, micro_batches = zero3_step.captured(update.engine), micro_batches_for(config, world)
    update.step(micro_batches)
    own = [sample for micro_batch in micro_batches for sample in micro_batch]
    references = [{sample.sequence_id: sample.reference_logprobs.cpu() for sample in own}]  # type: ignore[union-attr]
    return {
        "gradient": gradients[0],
        "reference": {k: v for each in world.gather(references) for k, v in each.items()},
    }


def results(world: World, *splits: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        split: {name: step(name, split, world) for name in (CASES if split == splits[0] else FEWER)}
        for split in splits
    }
    found["lora"] = {name: lora_step(name, splits[0], world) for name in ("reference", "beta")}
    return found


if __name__ == "__main__":
    zero3_step.save_results(results)
