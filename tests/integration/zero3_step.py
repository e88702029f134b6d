"""One real optimizer step under ZeRO-3 on fixed rollouts; run by torchrun or alone, writes its gradient.

Usage: zero3_step.py OUT.pt LOSS BATCH_SIZE ACCUMULATION BETA
"""

from __future__ import annotations

import importlib.resources
import random
import sys

import torch
from deepspeed.utils import safe_get_full_grad

from grpox.config import RunConfig
from grpox.contracts import Rollout
from grpox.engine import Engine, FrozenEngine
from grpox.models import load_model
from grpox.optimizers import AdamW, NamedSchedule
from grpox.plugins import discover
from grpox.config import ComponentRef
from grpox.registry import Registry
from grpox.rollout import collate
from grpox.sampling import BatchPlan, PromptSampler, Schedule
from grpox.update import PolicyUpdate, Slice
from grpox.world import start_world

ROWS = 24
MAX_LENGTH = 7


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


def main(out: str, loss: str, batch_size: int, accumulation: int, beta: float) -> None:
    world = start_world()
    torch.manual_seed(0)
    model_path = str(importlib.resources.files("grpox.recipes") / "quickstart" / "model")
    config = RunConfig.model_validate(
        {
            "model": {"path": model_path},
            "data": {"path": "unused.jsonl"},
            "rewards": ["exact"],
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
    registry = Registry(discover())
    policy_loss = registry.build(registry.parse("loss", ComponentRef(name=loss), "loss"))
    correction = registry.build(registry.parse("correction", ComponentRef(name="none"), "correction"))
    plan = BatchPlan.from_config(config.train, world.size)
    schedule = Schedule(plan, PromptSampler(1000, plan.prompts_per_generation, False, 0), max_steps=1)
    reference = None
    if beta:
        other = load_model(config.model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.97)
        reference = FrozenEngine(other, config, world)
    engine = Engine(load_model(config.model), config, world, 10, AdamW(config.train), NamedSchedule(config.train))
    assert all(p.ds_tensor.numel() < p.ds_numel or world.size == 1 for p in engine.module.parameters())

    rows, advantages = rollouts()
    slices = []
    (step,) = schedule.steps()
    for micro_batch in step.micro_batches:
        mine = micro_batch.rank_rows(world.rank)
        batch = collate(rows[mine.start : mine.stop], advantages[mine.start : mine.stop], 0, world.device)
        slices.append(Slice(batch))

    gradient: dict[str, torch.Tensor] = {}
    take_step = engine.step

    def capture_and_step() -> float:
        for name, parameter in engine.module.named_parameters():
            gradient[name] = safe_get_full_grad(parameter).clone()
        return take_step()

    engine.step = capture_and_step  # type: ignore[method-assign]
    metrics = PolicyUpdate(engine, reference, policy_loss, correction, config, world).step(slices)
    weights = dict(engine.weights())
    if world.is_main:
        torch.save({"gradient": gradient, "metrics": metrics, "weights": weights}, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
