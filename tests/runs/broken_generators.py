"""The generator hf, broken in one way each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpox.config import SamplingConfig
from grpox.contracts import Prompt, Rollout, WeightStream
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class Right(HfGenerator):
    provides = ("logprobs",)

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            yield self.broken(rollout)

    def broken(self, rollout: Rollout) -> Rollout:
        return rollout


def changed(change: Callable[[Rollout], Rollout]) -> type[Right]:
    """Return a generator each of whose rollouts is changed."""
    return type("Changed", (Right,), {"broken": lambda self, rollout: change(rollout)})


def without_its_end(rollout: Rollout) -> Rollout:
    if rollout.finish_reason == "length":
        return rollout
    ids, logprobs = rollout.completion_ids[:-1], (rollout.sampler_logprobs or ())[:-1]
    return replace(rollout, completion_ids=ids or rollout.completion_ids, sampler_logprobs=logprobs)


def at_another_temperature(rollout: Rollout) -> Rollout:
    return replace(rollout, sampler_logprobs=tuple(0.9 * value for value in rollout.sampler_logprobs or ()))


CountsFromOne = changed(lambda rollout: replace(rollout, sample=rollout.sample + 1))
DropsTheEnd = changed(without_its_end)
AlwaysStops = changed(lambda rollout: replace(rollout, finish_reason="stop"))
OtherTemperature = changed(at_another_temperature)
NoLogprobs = changed(lambda rollout: replace(rollout, sampler_logprobs=None))


class IgnoresSeed(Right):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        yield from super().generate(prompts, sampling, 0)


class GlobalNumbers(Right):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        yield from super().generate(prompts, sampling, int(torch.randint(1 << 30, ())))


class NeverGreedy(Right):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        warm = sampling.model_copy(update={"temperature": max(sampling.temperature, 2.0)})
        yield from super().generate(prompts, warm, seed)


class OldWeights(Right):
    def sync(self, weights: WeightStream, version: int) -> None:
        if version == 0:
            super().sync(weights, version)
        self.version = version


class OldVersion(Right):
    def sync(self, weights: WeightStream, version: int) -> None:
        super().sync(weights, 0)


class ForgetsAsleep(Right):
    def sleep(self) -> None:
        model: Any = self.model
        for parameter in model.parameters():
            parameter.data.zero_()


class Ahead(Right):
    provides = ("logprobs", "ahead", "max_tokens")

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        return list(self.generate(prompts, sampling, seed))


class BeginsWhenRead(Ahead):
    def begin(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        return self.generate(prompts, sampling, seed)
