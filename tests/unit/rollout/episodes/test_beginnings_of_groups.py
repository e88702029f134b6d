"""The first turns of groups, sampled together where their members begin alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import pytest
import torch
from support.chat_templates import CHATML, byte_tokenizer

from grpox.config import EpisodesConfig, SamplingConfig
from grpox.contracts import Prompt, Rollout
from grpox.data.prompts import PromptSet
from grpox.environments import Environment
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import EnvironmentSpec
from grpox.rollout.episodes.turn_tokens import TurnTokens
from grpox.rollout.episodes.waves import EpisodeLoop
from grpox.rollout.sampler import SampleRequest
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World


class Forgetful(Environment):
    """Begins each episode of the row "b" in its own way, whatever the seed."""

    begun = 0
    forgets = False

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        Forgetful.begun += 1
        return str(Forgetful.begun) if row["prompt"] == "b" and self.forgets else "start"


def first_prompts() -> tuple[list[Prompt], list[Rollout]]:
    """Play two groups of two episodes, and return the requests of the first wave and the episodes."""
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    data = PromptSet(rows, "prompt", byte_tokenizer(CHATML), has_episodes=True)
    environments = LocalEnvironments([EnvironmentSpec("env", "environment", Forgetful)], [], EpisodesConfig())
    tokens = TurnTokens(data)
    rows: Any = (lambda prompts, row: 0, lambda prompts: tokens)
    world = World(0, 1, torch.device("cpu"))
    loop = EpisodeLoop(EpisodesConfig(), environments, ["env"], [1.0], *rows, world, PhaseTimes())
    request = SampleRequest(data, (0, 1), 2, SamplingConfig(max_completion_length=8), (0, 3))
    asked: list[Prompt] = []
    ended: list[Rollout] = []

    def sample(prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> list[Rollout]:
        asked.extend(prompts)
        return [
            Rollout(each.group_id, number, each.token_ids, (5, 10 * each.group_id + number), "stop", 0)
            for each in prompts
            for number in range(each.num_samples)
        ]

    loop.sample(request, request.of_rank(world), 7, sample, ended.append)
    return asked, ended


def test_a_group_that_begins_in_several_ways_changes_no_other_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (alike, _), _ = first_prompts()
    assert not caplog.records
    monkeypatch.setattr(Forgetful, "forgets", True)
    monkeypatch.setattr(logging.getLogger("grpox"), "propagate", True)
    asked, ended = first_prompts()
    assert asked[0] == alike  # the same seed and tokens for the group that begins as it should
    assert [each.num_samples for each in asked] == [2, 1, 1]
    places = [(each.group_id, each.sample) for each in ended]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for each in ended:  # each request went to its own episode
        request = next(p for p in asked if each.completion_ids[1] // 10 == p.group_id)
        assert each.prompt_ids == request.token_ids
    assert [record.getMessage() for record in caplog.records if "began differently" in record.getMessage()]
