"""A generator on a real model, the quickstart's, started as a run starts it on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpox.config import SamplingConfig
from grpox.contracts import Generator, GeneratorContext, Prompt, Rollout
from grpox.policy.models import architecture_of, stop_token_ids
from grpox.policy.weight_stream import stream_weights
from grpox.runfile.load import load_run
from grpox.training.inputs import open_model, open_tokenizer

TEXTS = ("12+7=", "5+5=", "48+37=")
SEED = 3


@dataclass(frozen=True)
class Stage:
    """The generator, the policy that it samples from, and prompts for it."""

    generator: Generator
    policy: PreTrainedModel
    stop_token_ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    def sync(self, version: int) -> None:
        """Give the generator the policy's weights."""
        self.generator.sync(stream_weights(self.policy), version)

    def sample(
        self,
        sampling: SamplingConfig,
        seed: int = SEED,
        samples: int = 4,
        max_tokens: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Sample rollouts of all prompts, in row order; `max_tokens` is of each prompt."""
        requests = self._requests(samples)
        if max_tokens is not None:
            requests = [replace(each, max_tokens=most) for each, most in zip(requests, max_tokens, strict=True)]
        return _in_row_order(self.generator.generate(requests, sampling, seed))

    def begin(self, sampling: SamplingConfig) -> Callable[[], list[Rollout]]:
        """Sample in the background, by a generator that provides "ahead"; returns a reader of the rollouts."""
        generator: Any = self.generator
        begun: Iterable[Rollout] = generator.begin(self._requests(4), sampling, SEED)
        return lambda: _in_row_order(begun)

    def _requests(self, samples: int) -> list[Prompt]:
        return [Prompt(group, ids, samples) for group, ids in enumerate(self.prompts)]

    @torch.no_grad()
    def logits(self, rollout: Rollout) -> Tensor:
        """Compute the policy's logits for each completion token: f32[T, V]."""
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        logits: Tensor = self.policy(input_ids=ids).logits[0].float()
        return logits[len(rollout.prompt_ids) - 1 : -1]

    @torch.no_grad()
    def change_policy(self) -> None:
        """Change the weights by noise, a quarter of their own standard deviation."""
        random = torch.Generator().manual_seed(0)
        for parameter in self.policy.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float32)
            parameter.add_(0.25 * parameter.std(correction=0) * noise.to(parameter.dtype))


def set_stage(generator: Any, texts: Sequence[str] = TEXTS) -> Stage:
    """Start `generator` beside the quickstart's model; it has weights from the first sync on."""
    run = load_run("quickstart", [])
    tokenizer, model = open_tokenizer(run), open_model(run).eval()
    stops = stop_token_ids(model, tokenizer)
    context = GeneratorContext(
        model_path=Path(run.config.model.path),
        build_model=architecture_of(model),
        tokenizer=tokenizer,
        stop_token_ids=stops,
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        seed=0,
        policy=model,
    )
    if hasattr(generator, "preflight"):
        generator.preflight(model.config)
    generator.start(context)
    prompts = tuple(tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    return Stage(generator, model, stops, prompts)


def _in_row_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))
