"""A generator that samples ahead and marks rollouts, rewards, a scaler, and a loss that writes its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from grpox.config import SamplingConfig
from grpox.contracts import (
    AdvantageInputs,
    LossInputs,
    LossOutput,
    Prompt,
    Reduction,
    Rollout,
    StepContext,
)
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class MarksAhead(HfGenerator):
    """Writes into `Rollout.extra` what the rollout itself says."""

    provides = ("logprobs", "ahead", "max_tokens")

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        for rollout in super().generate(prompts, sampling, seed):
            facts = ("group_id", "sample", "policy_version", "sampler_logprobs")
            yield replace(rollout, extra={name: getattr(rollout, name) for name in facts})

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        return list(self.generate(prompts, sampling, seed))


def number_of(completions: Sequence[str], **columns: Any) -> list[float]:
    """Score a completion by a number that few others have."""
    return [sum(place * ord(letter) for place, letter in enumerate(text, 1)) / 1024 for text in completions]


def length_of(completions: Sequence[str], **columns: Any) -> list[float | None]:
    """Score the length; abstain from empty texts."""
    return [float(len(text)) or None for text in completions]


class ByAnswer:
    """The reward less the mean of its group, times 1, 2 or 3 by the answer of its row."""

    def scale(self, inputs: AdvantageInputs) -> torch.Tensor:
        total = (inputs.rewards * inputs.weights).nansum(dim=1)
        means = torch.stack([total[inputs.group_ids == group].mean() for group in inputs.group_ids])
        return (total - means) * torch.tensor([1 + int(each) % 3 for each in inputs.columns["answer"]])


class WritesInputs:
    """-w A + 0.1 KL - 0.001 H, and a line for each sequence with what the loss is given of it."""

    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN
    needs = (
        *("sampler_logprobs", "reference_logprobs", "entropy_gradient"),
        *("rewards", "group_ids", "sequence_ids", "columns"),
    )
    stateless = True

    class Config(BaseModel):
        file: str

    def __init__(self, config: Config) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.file = f"{config.file}.{rank}"
        self.step = 0

    def begin_step(self, context: StepContext) -> None:
        self.step = context.step

    def per_token(self, inputs: LossInputs) -> LossOutput:
        tokens = ("logprobs", "old_logprobs", "sampler_logprobs", "reference_logprobs", "advantages")
        with open(self.file, "a", encoding="utf-8") as file:
            for row, mask in enumerate(inputs.token_mask):
                line: dict[str, Any] = {name: getattr(inputs, name)[row][mask].tolist() for name in tokens}
                numbers = ("rewards", "group_ids", "sequence_ids")
                line |= {name: getattr(inputs, name)[row].tolist() for name in numbers}
                answer = inputs.columns["answer"][row]  # type: ignore[index]
                file.write(json.dumps({"step": self.step, "answer": answer, **line}) + "\n")
        assert inputs.reference_logprobs is not None
        assert inputs.entropy is not None
        rho = inputs.reference_logprobs - inputs.logprobs
        loss = -torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages
        return LossOutput(loss + 0.1 * (torch.exp(rho) - rho - 1) - 0.001 * inputs.entropy)
