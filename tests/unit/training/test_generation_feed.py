"""The samples of a generation batch: what they carry for the loss, and whose tokens are recorded."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pluggy import PluginManager
from support.logs import LoggedText

from grpox.checkpoint.progress import TrainingState
from grpox.contracts import Rollout, Turn
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.errors import RunFailed
from grpox.observing.observers import Observers
from grpox.policy.batch import Sample, TokenRecord
from grpox.rollout.advantages import Advantages
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.world import World
from grpox.training.generation_feed import GenerationFeed, TokenChoice, check_plain
from grpox.training.step_report import StepReport
from grpox.update.token_metrics import TokenFacts

GROUP = 2
ALL = ("rewards", "group_ids", "sequence_ids", "columns")
FIELDS = ("rewards", "group_id", "sequence_id", "columns")
NAN = float("nan")


class Prompts:
    """Rows with a number and a list; those of one generation batch at a time, as of a stream."""

    generation = 0

    def columns_of(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        assert {index // 10 for index in indices} == {self.generation}
        return [{"number": index, "tags": [index]} for index in indices]


class Batches:
    """Generation batches of three groups of two; group g of batch b has dataset row 10 b + g."""

    prompts = Prompts()
    sampler = SimpleNamespace(release=lambda: None)

    def collect(self, generation: int, indices: object, progress: object, prefetched: object) -> Any:
        # A rollout's own group_id is not the row's after dynamic sampling: nothing may be read from it.
        rollouts = [Rollout(99, row % 2, (1,), (2,), "stop", 0) for row in range(6)]
        rewards = torch.tensor([[float(row), NAN] for row in range(6)])
        self.prompts.generation = generation
        dataset_rows = [10 * generation + group for group in range(3)]
        return SimpleNamespace(
            rollouts=rollouts,
            rewards=rewards,
            totals=rewards[:, 0],
            scaled=Advantages(torch.ones(6)),
            indices=dataset_rows,
        )


def collected(*needs: str, rank: int = 0, ranks: int = 1, tokens: int = 0) -> dict[tuple[int, int], Sample]:
    """Samples of a step on a rank, `tokens` of which are recorded."""
    plan = schedule(BatchPlan(ranks, 6 // ranks, 2, 1, GROUP), steps=1)
    config: Any = SimpleNamespace(old_logprobs="policy", mask_truncated_completions=False)
    collector: Any = Batches()
    world, choice = World(rank, ranks, torch.device("cpu")), TokenChoice(plan, tokens, 1)
    feed = GenerationFeed(config, plan, collector, TrainingState(), world, needs, choice=choice)
    [step] = plan.steps()
    feed.collect(step)
    return feed.state.samples


@pytest.mark.parametrize(
    ("needed", "fields"),
    [*((need, {field}) for need, field in zip(ALL, FIELDS, strict=True)), ("entropy", set())],
)
def test_samples_carry_only_what_is_needed(needed: str, fields: set[str]) -> None:
    for sample in collected(needed).values():
        assert {each for each in FIELDS if getattr(sample, each) is not None} == fields


def test_each_sample_carries_its_own_rewards_numbers_and_the_columns_of_its_prompt() -> None:
    """Numbers differ between the generation batches of a step."""
    samples = collected(*ALL)
    assert [sample.group_id for sample in samples.values()] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [sample.sequence_id for sample in samples.values()] == list(range(12))
    for (generation, row), sample in samples.items():
        assert sample.rewards is not None
        assert sample.rewards.dtype == "float32"
        assert sample.rewards[0] == row
        assert sample.rewards[1] != sample.rewards[1]  # NaN: it abstained
        number = 10 * generation + row // 2
        assert sample.columns == {"number": number, "tags": [number]}


def test_ranks_carry_and_record_what_one_rank_would() -> None:
    """Three rows a rank part a group; the numbers are those of the rows all the same."""

    def facts(rank: int, ranks: int) -> dict[tuple[int, int], Any]:
        of_rank = collected(*ALL, rank=rank, ranks=ranks, tokens=5).items()
        return {
            key: (each.group_id, each.sequence_id, each.columns, each.token_record and each.token_record.part)
            for key, each in of_rank
        }

    alone, one, other = facts(0, 1), facts(0, 2), facts(1, 2)
    assert one | other == alone
    assert len(one) == len(other) == 6
    recorded = [[record for *_, record in each.values() if record] for each in (alone, one, other)]
    assert len(recorded[0]) == 5
    assert min(map(len, recorded)) > 0


def test_a_value_that_no_checkpoint_can_hold_is_refused_by_its_column() -> None:
    check_plain([{"answer": each} for each in ("4", None, 2.5, True, b"x", {"a": [1, ("b",)]})])
    with pytest.raises(RunFailed, match="column 'day' holds a date"):
        check_plain([{"answer": "4"}, {"answer": "4", "day": {"at": [datetime.date(2026, 1, 1)]}}])


def schedule(plan: BatchPlan, steps: int = 20) -> Schedule:
    return Schedule(plan, PromptSampler(100, plan.prompts_per_generation, False, 0), max_steps=steps)


def batch_of(rewards: list[float], **fields: Any) -> Any:
    rollouts = [
        Rollout(row // GROUP, row % GROUP, (1,), (2, 3), "stop", 0, **fields) for row in range(len(rewards))
    ]
    return SimpleNamespace(rollouts=rollouts, totals=torch.tensor(rewards))


def chosen(choice: TokenChoice, *batches: list[float], first: int = 0) -> dict[tuple[int, int], Any]:
    return choice.records({first + number: batch_of(each) for number, each in enumerate(batches)})


def test_completions_are_spread_over_the_rewards_and_unscored_ones_come_first() -> None:
    choice = TokenChoice(schedule(BatchPlan(1, 8, 1, 1, GROUP)), 3, 1)
    rewards = [0.5, 1.0, math.nan, 0.25, -1.0, 0.75, 0.0, 0.5]
    # In order: nan, -1, 0, 0.25, 0.5 of row 0, 0.5 of row 7, 0.75, 1.
    assert sorted(chosen(choice, rewards)) == [(0, 0), (0, 1), (0, 2)]


def test_each_step_of_a_generation_batch_has_its_own() -> None:
    choice = TokenChoice(schedule(BatchPlan(1, 4, 1, 3, GROUP, num_iterations=2)), 2, 1)
    found = chosen(choice, [float(row) for row in range(12)])
    assert sorted(found) == [(0, 0), (0, 3), (0, 4), (0, 7), (0, 8), (0, 11)]
    assert {record.step for record in found.values()} == {1}
    later = chosen(choice, [float(row) for row in range(12)], first=2)
    assert {record.step for record in later.values()} == {13}
    concerned = [choice.concerns(plan) for plan in choice.schedule.steps()][:6]
    assert concerned == [True, True, True, False, False, False]


def test_a_step_of_several_generation_batches_has_as_many_and_numbers_them_as_their_files() -> None:
    choice = TokenChoice(schedule(BatchPlan(1, 4, 3, 1, GROUP)), 3, 1)
    found = chosen(choice, [0.0, 1.0, 2.0, 3.0], [9.0] * 4, [-5.0] * 4, first=3)
    assert [(key, record.step, record.part) for key, record in sorted(found.items())] == [
        ((3, 2), 2, 1),
        ((4, 3), 2, 2),
        ((5, 0), 2, 3),
    ]


def test_batches_whose_completions_are_not_saved_have_none() -> None:
    plan = schedule(BatchPlan(1, 4, 3, 1, GROUP))
    found = chosen(TokenChoice(plan, 99, 2), *[[0.0] * 4] * 3)
    assert {(key[0], record.part) for key, record in found.items()} == {(0, 1), (2, 2)}
    for tokens, every in ((0, 1), (8, 0)):
        choice = TokenChoice(plan, tokens, every)
        assert chosen(choice, [0.0] * 4) == {}
        assert not any(choice.concerns(step) for step in plan.steps())


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({}, [0, 0]),
        ({"model_mask": (False, True)}, [-1, 0]),
        ({"model_mask": (1, 0)}, [0, -1]),  # as some generators write it
        ({"model_mask": (True, True), "turns": (Turn(0, 1, "stop", 0), Turn(1, 2, "stop", 0))}, [0, 1]),
        ({"model_mask": (False, True), "turns": (Turn(1, 2, "stop", 0),)}, [-1, 0]),
    ],
)
def test_turns_are_numbered_and_observations_have_none(fields: dict[str, Any], turns: list[int]) -> None:
    choice = TokenChoice(schedule(BatchPlan(1, 4, 1, 1, GROUP)), 1, 1)
    [record] = choice.records({0: batch_of([0.0] * 4, **fields)}).values()
    assert record.turns.tolist() == turns


def test_tokens_that_cannot_be_written_end_no_run(tmp_path: Path, logged: LoggedText) -> None:
    """A file in the way of the folder; and a tokenizer that fails."""
    (tmp_path / "tokens").write_text("in the way")
    record = TokenRecord(1, 1, 0, 0, np.zeros(0, np.int32))
    truths, numbers = [np.zeros(0, np.bool_)] * 2, [np.zeros(0, np.float32)] * 6
    facts = TokenFacts(record, np.zeros(0, np.int32), *truths, *numbers)
    context: Any = SimpleNamespace(output_dir=tmp_path)
    observers = Observers(PluginManager("grpox"), [])
    sound = SimpleNamespace(all_special_ids=[], added_tokens_decoder={}, encode=lambda *_, **__: [1])
    for tokenizer in (sound, None):
        collector: Any = SimpleNamespace(prompts=SimpleNamespace(chat=SimpleNamespace(tokenizer=tokenizer)))
        warn = WarnOnce(get_logger("grpox.test"))
        report = StepReport(context, TrainingState(), collector, observers, warn, is_main=True)
        report.tokens_recorded(1, [facts])
    told = logged()
    assert told.count("observer 'record' failed in tokens_recorded: tokens are not saved: ") == 1
    assert "tokens/step_000001.parquet" in told
    assert observers.failures == {("record", "tokens_recorded"): 2}
