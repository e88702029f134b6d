"""One point of memory.py in a process of its own: the peak of an update's memory beyond the model's.

Usage: memory_point.py ARGUMENTS.json OUT; writes OUT.0
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bare_update import plain_loss
from transformers import LlamaConfig, LlamaForCausalLM

from grpox.config import RunConfig
from grpox.contracts import Rollout
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.policy.batch import PackedBatch, collate, samples_of
from grpox.policy.engine import Engine
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.runtime.setup import quieten
from grpox.runtime.world import World, start_world
from grpox.update.policy_update import PolicyUpdate

HIDDEN, LAYERS, HEADS = 64, 2, 2
RESETS_PEAK = "5"
"""Value for /proc/self/clear_refs that resets VmHWM."""


class Peak:
    """The most memory that this process has held since `reset`, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text(RESETS_PEAK)

    def held(self) -> int:
        """Return the memory in use now, without the allocator's reserve."""
        gc.collect()
        if self.cuda:
            return torch.cuda.memory_allocated()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return _resident("VmRSS")

    def read(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else _resident("VmHWM")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def run_config(folder: str, rows: int, completion: int, dtype: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": dtype},
            "data": {"path": "unused.jsonl"},
            "rewards": ["exact"],
            "train": {"per_device_train_batch_size": rows, "num_generations": rows, "learning_rate": 1e-9},
            "sampling": {"max_completion_length": completion},
        }
    )


def batch_of(rows: int, length: int, vocabulary: int, device: torch.device) -> PackedBatch:
    """`rows` sequences of `length` tokens, half of which are the completion's; all teach."""
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    half = length // 2
    rollouts = [Rollout(r, 0, tuple(row[:half]), tuple(row[half:]), "stop", 0) for r, row in enumerate(tokens)]
    return collate(samples_of(rollouts, [(-1.0) ** row for row in range(rows)]), device)


def engine_of(config: RunConfig, vocabulary: int, world: World) -> Any:
    """A tiny body under the head of a large vocabulary, tied to the embedding."""
    torch.manual_seed(0)
    architecture = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=1 << 16,
    )
    model = LlamaForCausalLM(architecture).to(getattr(torch, config.model.dtype))
    return Engine(model, config, world, 1000, AdamW(config.train), NamedSchedule(config.train))


def take_of(side: str, engine: Any, config: RunConfig, world: World) -> Callable[[PackedBatch], None]:
    """A whole step on one micro-batch."""
    if side == "plain":

        def plain(batch: PackedBatch) -> None:
            engine.begin_micro_batch(last=True)
            engine.backward(plain_loss(engine, batch, int(batch.token_mask.sum()), 1.0, all_logits=True))
            engine.step()

        return plain
    registry = Registry(discover())
    parts = [
        registry.build(registry.parse(kind, getattr(config, kind), kind)) for kind in ("loss", "correction")
    ]
    update = PolicyUpdate(engine, None, parts[0], parts[1], config, world)

    def ours(batch: PackedBatch) -> None:
        update.step([[replace(sample) for sample in batch.samples]])  # each time without pi_old

    return ours


def measured(take: Callable[[], None], engine: Any, peak: Peak) -> dict[str, int]:
    """Peaks above what is held before: of forward, backward and the optimizer's step."""
    found: dict[str, int] = {}
    backward, step = engine.backward, engine.step
    before = peak.held()

    def ended(phase: str) -> None:
        found[phase] = peak.read() - before
        peak.reset()

    def going_back(loss: torch.Tensor) -> None:
        ended("forward")
        backward(loss)

    def stepping(loss: torch.Tensor | None = None) -> torch.Tensor:
        ended("backward")
        return step(loss)

    engine.backward, engine.step = going_back, stepping
    peak.reset()
    try:
        take()
    finally:
        engine.backward, engine.step = backward, step
    return found | {"optimizer_step": peak.read() - before, "held": before}


def main(told: str, out: str) -> None:
    given = json.loads(Path(told).read_text())
    quieten()
    world = start_world()
    rows, length, vocabulary = given["rows"], given["length"], given["vocabulary"]
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(folder, rows, length // 2, given["dtype"])
        engine = engine_of(config, vocabulary, world)
    take, peak = take_of(given["side"], engine, config, world), Peak(world.device)
    single = batch_of(1, 2, vocabulary, world.device)
    whole = batch_of(rows, length, vocabulary, world.device)
    for batch in (single, whole, whole):  # afterwards optimizer states and buffers are there
        take(batch)
    figures = {
        "single": measured(lambda: take(single), engine, peak),
        "whole": measured(lambda: take(whole), engine, peak),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
    }
    Path(f"{out}.0").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
