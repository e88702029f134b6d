"""The samples of a generation batch carry what the run's loss needs, and no more."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpox.checkpoint.progress import TrainingState
from grpox.contracts import Rollout
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.errors import RunFailed
from grpox.rollout.turns import Advantages
from grpox.runtime.world import World
from grpox.training.generation_feed import GenerationFeed, check_plain

ALL = ("rewards", "group_ids", "sequence_ids", "columns")
FIELDS = ("rewards", "group_id", "sequence_id", "columns")
NAN = float("nan")


class Prompts:
    """Rows with a number and a list."""

    def rows(self, indices: Sequence[int]) -> tuple[list[str], dict[str, list[Any]]]:
        return [], {"number": list(indices), "tags": [[index] for index in indices]}


class Batches:
    """Generation batches of three groups of two; group g of batch b has dataset row 10 b + g."""

    prompts = Prompts()
    sampler = SimpleNamespace(release=lambda: None)

    def collect(self, generation: int, indices: object, progress: object, prefetched: object) -> Any:
        # A rollout's own group_id is not the row's after dynamic sampling: nothing may be read from it.
        rollouts = [Rollout(99, row % 2, (1,), (2,), "stop", 0) for row in range(6)]
        rewards = torch.tensor([[float(row), NAN] for row in range(6)])
        dataset_rows = [10 * generation + group for group in range(3)]
        return SimpleNamespace(
            rollouts=rollouts,
            rewards=rewards,
            totals=rewards[:, 0],
            scaled=Advantages(torch.ones(6)),
            indices=dataset_rows,
        )


def feed_of(*needs: str, rank: int = 0, ranks: int = 1) -> GenerationFeed:
    plan = BatchPlan(ranks, 6 // ranks, 2, 1, 2)
    schedule = Schedule(plan, PromptSampler(9, plan.prompts_per_generation, False, 0), max_steps=1)
    config: Any = SimpleNamespace(old_logprobs="policy", mask_truncated_completions=False)
    collector: Any = Batches()
    world = World(rank, ranks, torch.device("cpu"))
    return GenerationFeed(config, schedule, collector, TrainingState(), world, needs)


def collected(feed: GenerationFeed) -> GenerationFeed:
    [plan] = feed.schedule.steps()
    feed.collect(plan)
    return feed


@pytest.mark.parametrize(
    ("needed", "fields"),
    [*((need, {field}) for need, field in zip(ALL, FIELDS, strict=True)), ("entropy", set())],
)
def test_samples_carry_only_what_is_needed(needed: str, fields: set[str]) -> None:
    for sample in collected(feed_of(needed)).state.samples.values():
        assert {each for each in FIELDS if getattr(sample, each) is not None} == fields


def test_numbers_differ_between_the_generation_batches_of_a_step() -> None:
    samples = collected(feed_of(*ALL)).state.samples
    assert [sample.group_id for sample in samples.values()] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [sample.sequence_id for sample in samples.values()] == list(range(12))


def test_each_sample_carries_its_own_rewards_and_the_columns_of_its_prompt() -> None:
    samples = collected(feed_of(*ALL)).state.samples
    for (generation, row), sample in samples.items():
        assert sample.rewards is not None
        assert sample.rewards.dtype == "float32"
        assert sample.rewards[0] == row
        assert sample.rewards[1] != sample.rewards[1]  # NaN: it abstained
        number = 10 * generation + row // 2
        assert sample.columns == {"number": number, "tags": [number]}


def test_a_rank_carries_the_numbers_that_the_rows_have_on_one_rank() -> None:
    alone = collected(feed_of(*ALL)).state.samples
    # Three rows a rank part a group; the numbers are those of the rows all the same.
    for rank in (0, 1):
        for key, sample in collected(feed_of(*ALL, rank=rank, ranks=2)).state.samples.items():
            assert (sample.group_id, sample.sequence_id, sample.columns) == (
                alone[key].group_id,
                alone[key].sequence_id,
                alone[key].columns,
            )


def test_a_value_that_no_checkpoint_can_hold_is_refused_by_its_column() -> None:
    check_plain({"answer": ["4", None, 2.5, True, b"x", {"a": [1, ("b",)]}]})
    with pytest.raises(RunFailed, match="column 'day' holds a date"):
        check_plain({"answer": ["4"], "day": [{"at": [datetime.date(2026, 1, 1)]}]})
