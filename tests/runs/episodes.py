"""Episodes of two turns, rewards in lists, scalers that read them, and data that differs by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import datasets
import torch
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import AdvantageInputs, Prompt, Rollout, Turn
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator

LENGTH = 2
"""Longest turn, in tokens."""


class TwoTurns(HfGenerator):
    """The environment answers the first turn by ``+1=`` in any case, and rewards a turn that begins by 7."""

    provides = ("logprobs", "max_tokens")

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        assert all(prompt.row is not None for prompt in prompts)
        answer, seven = (tuple(self.context.tokenizer(text)["input_ids"]) for text in ("+1=", "7"))
        first = list(super().generate([replace(p, max_tokens=LENGTH) for p in prompts], sampling, seed))
        follow = [
            Prompt(n, (*one.prompt_ids, *one.completion_ids, *answer), 1, max_tokens=LENGTH)
            for n, one in enumerate(first)
        ]
        for two in super().generate(follow, sampling, seed + 1):
            one = first[two.group_id]
            ids = (one.completion_ids, answer, two.completion_ids)
            begin = len(one.completion_ids) + len(answer)
            rewards = [float(turn.completion_ids[0] == seven[0]) for turn in (one, two)]
            yield Rollout(
                group_id=one.group_id,
                sample=one.sample,
                prompt_ids=one.prompt_ids,
                completion_ids=sum(ids, ()),
                finish_reason="turns",
                policy_version=self.version,
                sampler_logprobs=(*one.sampler_logprobs, *[0.0] * len(answer), *two.sampler_logprobs),
                model_mask=tuple(part is not answer for part in ids for _ in part),
                turns=(
                    Turn(0, len(ids[0]), one.finish_reason, self.version, rewards[0]),
                    Turn(begin, begin + len(ids[2]), two.finish_reason, self.version, rewards[1], "+1="),
                ),
                extra={"sevens": sum(rewards), "answer": ["+1=", {"turn": 0}]},
            )


class OneByOne(TwoTurns):
    """Hands out the completions of all groups mixed, the last of each group first."""

    provides = ("logprobs", "max_tokens", "streaming")

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        rollouts = list(super().generate(prompts, sampling, seed))
        yield from sorted(rollouts, key=lambda rollout: (-rollout.sample, rollout.group_id))


class PerTurn:
    """A turn's reward less the mean of its group's turns of that number."""

    per = "turn"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        rewards = torch.tensor([[turn.reward or 0.0 for turn in turns] for turns in inputs.turns])
        size = int((inputs.group_ids == 0).sum())
        centred = rewards - rewards.view(-1, size, 2).mean(1).repeat_interleave(size, 0)
        return list(centred)


def nothing(completions: Sequence[str], **columns: Any) -> list[float]:
    """Score 0: the environment scores."""
    return [0.0] * len(completions)


def digits(completions: Sequence[str], **columns: Any) -> list[list[float]]:
    """Half a point for each digit of each part between ones."""
    return [[0.5 * len(part) for part in text.split("1")] for text in completions]


digits.per, digits.separator = "separator", "1"  # type: ignore[attr-defined]


def places(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[list[float] | None]:
    """Give each token a number that others do not have; abstain from completions that begin by an odd token."""
    return [
        [n / 7 + token for n, token in enumerate(ids)] if ids[0] % 2 == 0 else None for ids in completion_ids
    ]


places.per = "token"  # type: ignore[attr-defined]


def of_turns(completions: Sequence[str], **columns: Any) -> list[list[float]]:
    """Give the first turn the length of the text, and the second one its last digit."""
    return [[float(len(text)), float(text[-1]) if text[-1:].isdigit() else -1.0] for text in completions]


of_turns.per = "turn"  # type: ignore[attr-defined]


class FromLists:
    """Each token has the sum of the numbers that lie at it, each list by its weight."""

    per = "token"

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        lists = zip(inputs.weights, (inputs.token_rewards[label] for label in inputs.labels), strict=True)
        weighted = [[weight * row.nan_to_num() for row in rows] for weight, rows in lists]
        return [torch.stack(rows).sum(dim=0) for rows in zip(*weighted, strict=True)]


class ByRank:
    """Another order of sums on each rank."""

    def load(self) -> datasets.Dataset:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return datasets.Dataset.from_dict({"prompt": [f"{(n + rank) % 90 + 1}+{n % 9}=" for n in range(200)]})
