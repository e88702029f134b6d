"""A generator beside the trainer: do their log-probabilities agree, and how many tokens a second it samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from started import Started, start

from gpu_parts.models import QWEN_05B, TINY, described, write_model
from gpu_parts.part import Part
from grpox.contracts import Prompt, Rollout
from grpox.policy.batch import collate, samples_of
from grpox.policy.logprobs import completion_logprobs
from grpox.training.inputs import open_prompts

TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest mean difference of a token's log-probability, by dtype."""


def measure(part: Part) -> None:
    """Record the figures of `hf` on the quickstart's model, and on a larger one in bfloat16."""
    measure_generator(part, "hf")


def measure_generator(part: Part, generator: str) -> None:
    """Record mismatch and speed of one generator."""
    prompts, samples = (2, 4) if part.small else (16, 16)
    part.attempt("quickstart", lambda: sampled(part, generator, "float32", prompts, samples, ()))
    shape, longest, count = (TINY, 8, 2) if part.small else (QWEN_05B, 256, 8)
    folder = write_model(part.folder / "model", shape, part.device, torch.bfloat16)
    part.record("shape", described(shape))
    more = (f"model.path={folder}", f"sampling.max_completion_length={longest}")
    part.attempt("0.5B", lambda: sampled(part, generator, "bfloat16", count, count, more))
    for name in ("quickstart", "0.5B"):
        if "mean_difference" in (found := part.figures.get(name, {})):
            part.check(f"{name}: mismatch", found["mean_difference"], TOLERANCES[found["dtype"]])


def sampled(
    part: Part, generator: str, dtype: str, count: int, samples: int, more: Sequence[str]
) -> dict[str, Any]:
    """Sample twice, the second time for the clock, and score the completions with the trainer."""
    overrides = [f"generator={generator}", f"model.dtype={dtype}", "evaluation=null", "tracking={}", *more]
    started = start("quickstart", overrides)
    try:
        data, _ = open_prompts(started.run, started.tokenizer)
        prompts = [Prompt(group, data.token_ids(group % len(data)), samples) for group in range(count)]
        start_of_sync = time.perf_counter()
        started.generator.sync(started.engine.weights(), 0)
        part.synchronize()
        sync = time.perf_counter() - start_of_sync
        sampling = started.run.config.sampling
        list(started.generator.generate(prompts, sampling, 0))
        part.synchronize()
        begin = time.perf_counter()
        rollouts = list(started.generator.generate(prompts, sampling, 1))
        part.synchronize()
        seconds = time.perf_counter() - begin
        tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        return {
            "generator": generator,
            "dtype": dtype,
            "completions": len(rollouts),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "sync_ms": 1e3 * sync,
            **mismatch(started, rollouts),
        }
    finally:
        started.generator.close()
        started.engine.close()


def mismatch(started: Started, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Compare the sampler's log-probabilities with the trainer's, token by token."""
    engine, temperature = started.engine, started.run.config.sampling.temperature
    differences = []
    for begin in range(0, len(rollouts), 8):
        own = rollouts[begin : begin + 8]
        batch = collate(samples_of(own, [1.0] * len(own)), started.world.device, engine.mode)
        with torch.no_grad():
            logprobs, _ = completion_logprobs(engine, batch, temperature)
        sampler = batch.sampler_logprobs
        assert sampler is not None
        differences.append((logprobs - sampler)[batch.token_mask])
    every = torch.cat(differences).double()
    ratio = every.exp()
    return {
        "mean_difference": float(every.abs().mean()),
        "largest_difference": float(every.abs().max()),
        "kl": float((ratio - 1 - every).mean()),
    }
