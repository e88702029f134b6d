"""Optimizer steps of grpox, bare DeepSpeed and bare PyTorch on a random model, on the same sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpu_parts.models import Shape, random_model
from grpox.config import RunConfig
from grpox.contracts import Rollout
from grpox.plugins.registry import bind, installed
from grpox.policy.batch import PackedBatch, collate, samples_of
from grpox.policy.engine import Engine
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runtime.world import World
from grpox.update.policy_update import PolicyUpdate

CANDIDATES = ("grpox", "bare-zero3", "torch")
Step = Callable[[Sequence[PackedBatch]], float]
"""Micro-batches of a step -> the gradient's norm."""


def config_of(rows: int, completion: int, tokens: int, dtype: str) -> RunConfig:
    """Configure a step of micro-batches of at most `tokens` tokens."""
    return RunConfig.model_validate(
        {
            "model": {"path": "unused", "dtype": dtype},
            "data": {"path": "unused.jsonl"},
            "rewards": ["exact"],
            "train": {
                "per_device_train_batch_size": rows,
                "num_generations": rows,
                "max_tokens_per_micro_batch": tokens,
                # The weights stay: every step has the same gradient.
                "learning_rate": 1e-12,
            },
            "sampling": {"max_completion_length": completion},
        }
    )


def micro_batches(
    count: int, rows: int, prompt: int, completion: int, vocabulary: int, device: torch.device
) -> list[PackedBatch]:
    """Make micro-batches of sequences of one length, each with a prompt of its own; all teach."""
    rng = random.Random(0)
    batches = []
    for number in range(count):
        rollouts = [
            Rollout(
                number * rows + row,
                0,
                tuple(rng.choices(range(2, vocabulary), k=prompt)),
                tuple(rng.choices(range(2, vocabulary), k=completion)),
                "length",
                0,
            )
            for row in range(rows)
        ]
        advantages = [1.0 if row % 2 else -1.0 for row in range(rows)]
        batches.append(collate(samples_of(rollouts, advantages), device))
    return batches


class Candidate:
    """One candidate with its model and optimizer; `configure` before the first step and for other sizes."""

    def __init__(self, name: str, shape: Shape, config: RunConfig, world: World) -> None:
        model = random_model(shape, world.device, getattr(torch, config.model.dtype))
        self.name, self.world = name, world
        if name == "grpox":
            schedule = NamedSchedule(config.train)
            self.engine: Any = Engine(model, config, world, 1000, AdamW(config.train), schedule)
            self.module = self.engine.module
        else:
            from bare_update import BareZero3, PlainTorch

            self.engine = (BareZero3 if name == "bare-zero3" else PlainTorch)(model, config, world)
            self.module = model

    @property
    def mode(self) -> str | None:
        """The forward mode of grpox."""
        return str(self.engine.mode) if self.name == "grpox" else None

    def checkpoint_activations(self) -> None:
        self.module.gradient_checkpointing_enable({"use_reentrant": False})

    def step_of(self, config: RunConfig) -> Step:
        """Return the function that takes one optimizer step."""
        if self.name != "grpox":
            return lambda batches: float(self.engine.step(batches, tokens_of(batches)))
        kinds = ("loss", "correction")
        loss, correction = (installed().build(bind(kind, getattr(config, kind))) for kind in kinds)
        update = PolicyUpdate(self.engine, None, loss, correction, config, self.world)

        def take(batches: Sequence[PackedBatch]) -> float:
            # Each time without pi_old, as in the first step on a generation batch.
            samples = [[replace(sample) for sample in batch.samples] for batch in batches]
            return update.step(samples)["grad_norm"]

        return take


def tokens_of(batches: Sequence[PackedBatch]) -> int:
    """Count the completion tokens that are trained on, on the host."""
    return sum(int(sample.token_mask.sum()) for batch in batches for sample in batch.samples)
