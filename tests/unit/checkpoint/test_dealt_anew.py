"""Another number of ranks: which batch sizes take the same steps, and where rollouts in flight go."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from grpox.checkpoint.dealt_anew import Slices, dealt_anew
from grpox.checkpoint.rng import fresh_random_state, random_state
from grpox.checkpoint.same_batches import fitting, other_batches, same_steps
from grpox.contracts import Rollout
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.policy.batch import RolloutBatch, collate
from grpox.update.micro_batch import Slice

PAD = 0
ONE = BatchPlan(1, 8, 3, 6, 4)
"""8 rows a micro-batch, 24 a step, 48 a generation batch; below, the same of two ranks, and of other splits."""
OTHERS = [
    BatchPlan(2, 4, 3, 6, 4),
    BatchPlan(2, 12, 1, 2, 4),
    BatchPlan(1, 2, 12, 24, 4),
    BatchPlan(4, 3, 2, 4, 4),
]


def schedule(plan: BatchPlan) -> Schedule:
    return Schedule(plan, PromptSampler(100, plan.prompts_per_generation, True, 0), max_steps=6)


def rollouts(generation: int) -> list[Rollout]:
    """A generation batch of ragged rollouts, some completions empty, some with unknown log-probabilities."""
    rng = random.Random(generation)
    rows = []
    for row in range(48):
        completion = tuple(rng.randrange(1, 17) for _ in range(rng.randint(0, 7)))
        prompt = tuple(rng.randrange(1, 17) for _ in range(rng.randint(1, 6)))
        known = tuple(rng.uniform(-3, 0) for _ in completion) if row % 5 else None
        rows.append(Rollout(row // 4, row % 4, prompt, completion, "stop", 0, known))
    return rows


def scores(rollout: Rollout, width: int, seed: int) -> torch.Tensor:
    """Log-probabilities of a rollout: numbers that its tokens and `seed` say, 0 where it has none."""
    rng = random.Random(str((rollout.prompt_ids, rollout.completion_ids, rollout.sample, seed)))
    return torch.tensor(
        [rng.uniform(-3, 0) for _ in rollout.completion_ids] + [0.0] * (width - len(rollout.completion_ids))
    )


def sliced(plan: BatchPlan, rank: int, with_reference: bool = True) -> Slices:
    """What a rank holds of two generation batches, made as the trainer makes it."""
    slices: Slices = {}
    for generation in (3, 4):
        rows = rollouts(generation)
        advantages = [row / 10 for row in range(len(rows))]
        for micro_batch in schedule(plan).slices_of(generation):
            mine = micro_batch.rank_rows(rank)
            part = rows[mine.start : mine.stop]
            batch = collate(part, advantages[mine.start : mine.stop], PAD, torch.device("cpu"))
            width = batch.token_mask.shape[1]
            old, reference = (torch.stack([scores(each, width, seed) for each in part]) for seed in (1, 2))
            slices[generation, micro_batch.rows.start] = Slice(
                batch, old, reference if with_reference else None
            )
    return slices


def assert_equal(found: Slices, wanted: Slices) -> None:
    assert found.keys() == wanted.keys()
    for place, slice_ in wanted.items():
        assert list(found[place].batch.sequences) == list(slice_.batch.sequences)
        for name in sorted(set(RolloutBatch.__dataclass_fields__) - {"known_sequences"}):
            torch.testing.assert_close(
                getattr(found[place].batch, name), getattr(slice_.batch, name), rtol=0, atol=0, equal_nan=True
            )
        torch.testing.assert_close(found[place].old_logprobs, slice_.old_logprobs, rtol=0, atol=0)
        assert (found[place].reference_logprobs is None) == (slice_.reference_logprobs is None)
        if slice_.reference_logprobs is not None:
            torch.testing.assert_close(
                found[place].reference_logprobs, slice_.reference_logprobs, rtol=0, atol=0
            )


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_rollouts_in_flight_go_where_the_other_split_would_have_put_them(other: BatchPlan) -> None:
    for saved, plan in ((ONE, other), (other, ONE)):
        held = [sliced(saved, rank) for rank in range(saved.world_size)]
        for rank in range(plan.world_size):
            assert_equal(dealt_anew(held, saved, schedule(plan), rank, PAD), sliced(plan, rank))


def test_log_probabilities_that_some_rows_lack_are_computed_anew() -> None:
    held = [sliced(OTHERS[0], 0, with_reference=False), sliced(OTHERS[0], 1)]
    dealt = dealt_anew(held, OTHERS[0], schedule(ONE), 0, PAD)
    assert all(slice_.reference_logprobs is None for slice_ in dealt.values())
    assert all(slice_.old_logprobs is not None for slice_ in dealt.values())


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_split_has_the_same_rows_in_every_step(other: BatchPlan) -> None:
    assert same_steps(ONE, other)
    for mine, theirs in zip(schedule(ONE).steps(), schedule(other).steps(), strict=True):
        rows = [
            [(m.generation, m.iteration, row) for m in step.micro_batches for row in m.rows]
            for step in (mine, theirs)
        ]
        assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "change",
    [{"world_size": 2}, {"num_generations": 8}, {"num_iterations": 2}, {"gradient_accumulation_steps": 6}],
)
def test_other_batches_are_told_apart(change: dict[str, Any]) -> None:
    assert not same_steps(ONE, BatchPlan(**{**ONE.__dict__, **change}))


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (2, "per_device_train_batch_size=6 train.gradient_accumulation_steps=2 train.steps_per_generation=4"),
        (1, "per_device_train_batch_size=8 train.gradient_accumulation_steps=3 train.steps_per_generation=6"),
        (24, "per_device_train_batch_size=1 train.gradient_accumulation_steps=1 train.steps_per_generation=2"),
        (5, "5 ranks cannot share them evenly; 1, 2, 3, 4, 6, 8, 12, 24 can"),
    ],
)
def test_the_sizes_that_fit_are_told(ranks: int, told: str) -> None:
    assert told in fitting(ONE, ranks)
    problem = other_batches(ONE, BatchPlan(ranks, 8, 3, 6, 4))
    assert told in problem.allowed
    assert "train.per_device_train_batch_size" in problem.key


def test_what_is_told_to_fit_does() -> None:
    for ranks in (1, 2, 3, 4, 6, 8, 12, 24):
        sizes = [int(word.partition("=")[2]) for word in fitting(ONE, ranks).split()[:3]]
        assert same_steps(ONE, BatchPlan(ranks, *sizes, 4))


def test_a_rank_that_joins_has_numbers_of_its_own() -> None:
    before = random_state()
    states = [fresh_random_state(0, rank, 7)["python"][1] for rank in (1, 2, 1)]
    assert states[0] == states[2] != states[1]
    assert random_state()["python"] == before["python"]
