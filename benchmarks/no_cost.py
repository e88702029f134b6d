"""A generator and a reward that take no time, named by path in the runs of overhead_run.py."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import elsewhere
from work import varied_lengths

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, WeightStream


class Instant:
    """Completions of random tokens and varied lengths, made of nothing."""

    def start(self, context: GeneratorContext) -> None:
        self.tokens = range(3, context.policy.config.vocab_size)
        self.version = 0

    @elsewhere.count
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        rng = random.Random(seed)
        rows = [(prompt, sample) for prompt in prompts for sample in range(prompt.num_samples)]
        lengths = varied_lengths(len(rows), sampling.max_completion_length, seed=0)
        rollouts = []
        for (prompt, sample), length in zip(rows, lengths, strict=True):
            ids = tuple(rng.choices(self.tokens, k=length))
            logprobs = (-1.0,) * length
            ids_of = prompt.group_id, sample, prompt.token_ids, ids
            rollouts.append(Rollout(*ids_of, "stop", self.version, sampler_logprobs=logprobs))
        return rollouts

    @elsewhere.count
    def sync(self, weights: WeightStream, version: int) -> None:
        for _ in weights:
            pass
        self.version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@elsewhere.count
def length(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]
