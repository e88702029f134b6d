"""The worked schedules, the divisibility rules and the sampler's order."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import datasets
import pytest
from support.chat_templates import byte_tokenizer
from support.problems import problem_of, refused

from grpox.config import TrainConfig
from grpox.data.prompts import PromptSet
from grpox.data.row_stream import RowStream
from grpox.data.schedule import BatchPlan, PromptCursor, PromptSampler, Schedule, StreamSampler
from grpox.errors import RunFailed

SHORT = {
    "B": "per_device_train_batch_size",
    "GA": "gradient_accumulation_steps",
    "SPG": "steps_per_generation",
    "G": "num_generations",
}


def plan_of(world_size: int = 1, **train: Any) -> BatchPlan:
    config = TrainConfig(**{SHORT.get(name, name): value for name, value in train.items()})
    return BatchPlan.from_config(config, world_size)


def drawn(plan: BatchPlan, steps: int, rank: int = 0) -> list[list[str]]:
    """Prompt indices of each micro-batch of each step as one rank sees them, without shuffling."""
    sampler = PromptSampler(1000, plan.prompts_per_generation, shuffle=False, seed=0)
    table = []
    for step in Schedule(plan, sampler, max_steps=steps).steps():
        row = []
        for micro_batch in step.micro_batches:
            prompts = sampler.prompts_for(micro_batch.generation)
            row.append(" ".join(str(prompts[r // plan.num_generations]) for r in micro_batch.rank_rows(rank)))
        table.append(row)
    return table


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        (
            {"B": 3, "GA": 2, "SPG": 4, "G": 3},
            [["0 0 0", "1 1 1"], ["2 2 2", "3 3 3"], ["4 4 4", "5 5 5"], ["6 6 6", "7 7 7"]],
        ),
        # One step for each generation batch where steps_per_generation is not given.
        (
            {"B": 3, "GA": 4, "G": 3},
            [["0 0 0", "1 1 1", "2 2 2", "3 3 3"], ["4 4 4", "5 5 5", "6 6 6", "7 7 7"]],
        ),
        # A group straddles micro-batches, and two groups are in one.
        (
            {"B": 3, "GA": 4, "G": 4},
            [["0 0 0", "0 1 1", "1 1 2", "2 2 2"], ["3 3 3", "3 4 4", "4 4 5", "5 5 5"]],
        ),
        ({"B": 6, "GA": 2, "G": 3}, [["0 0 0 1 1 1", "2 2 2 3 3 3"]]),
        # A step spans generation batches where accumulation is the larger.
        ({"B": 2, "GA": 4, "SPG": 2, "G": 2}, [["0 0", "1 1", "2 2", "3 3"], ["4 4", "5 5", "6 6", "7 7"]]),
    ],
)
def test_rows_of_each_micro_batch(sizes: dict[str, int], steps: list[list[str]]) -> None:
    assert drawn(plan_of(**sizes), len(steps)) == steps


def test_two_ranks_share_each_micro_batch_and_groups_straddle_them() -> None:
    plan = plan_of(2, B=3, GA=2, SPG=4, G=2)
    assert drawn(plan, 3, rank=0) == [["0 0 1", "3 3 4"], ["6 6 7", "9 9 10"], ["12 12 13", "15 15 16"]]
    assert drawn(plan, 3, rank=1) == [["1 2 2", "4 5 5"], ["7 8 8", "10 11 11"], ["13 14 14", "16 17 17"]]


def test_sizes_of_a_plan() -> None:
    plan = plan_of(B=3, GA=2, SPG=4, G=3)
    assert (plan.generation_batch_size, plan.prompts_per_generation, plan.train_batch_size) == (12, 4, 6)
    assert plan.optimizer_steps_per_generation == 2
    plan = plan_of(2, B=4, generation_batch_size=32, G=8)
    assert (plan.steps_per_generation, plan.generation_batch_size, plan.prompts_per_generation) == (4, 32, 4)


def test_each_iteration_repeats_every_slice_before_the_next_generation() -> None:
    plan = plan_of(B=2, GA=1, SPG=2, G=2, num_iterations=2)
    sampler = PromptSampler(100, plan.prompts_per_generation, shuffle=False, seed=0)
    stream = [step.micro_batches[0] for step in Schedule(plan, sampler, max_steps=5).steps()]
    assert [(m.generation, m.iteration, m.rows.start) for m in stream] == [
        (0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 2), (1, 0, 0),
    ]  # fmt: skip
    assert plan.optimizer_steps_per_generation == 4
    assert plan_of(B=2, GA=4, SPG=2, G=2).optimizer_steps_per_generation == Fraction(1, 2)


@pytest.mark.parametrize(("accumulation", "per_generation", "iterations"), [(2, 4, 1), (4, 2, 3), (3, 3, 2)])
def test_over_whole_generations_every_row_is_trained_on_once_per_iteration(
    accumulation: int, per_generation: int, iterations: int
) -> None:
    plan = BatchPlan(2, 3, accumulation, per_generation, 2, iterations)
    sampler = PromptSampler(100, plan.prompts_per_generation, shuffle=True, seed=0)
    seen: dict[tuple[int, int], int] = {}
    for step in Schedule(plan, sampler, max_steps=12).steps():
        for m in step.micro_batches:
            for rank in range(2):
                for row in m.rank_rows(rank):
                    seen[m.generation, row] = seen.get((m.generation, row), 0) + 1
    generations = 12 * accumulation // plan.micro_batches_per_generation
    whole = {(g, row): iterations for g in range(generations) for row in range(plan.generation_batch_size)}
    assert {place: count for place, count in seen.items() if place[0] < generations} == whole


def test_a_resumed_schedule_goes_on_where_it_stopped() -> None:
    plan = BatchPlan(1, 2, 2, 4, 2, 3)
    whole = Schedule(plan, PromptSampler(50, plan.prompts_per_generation, True, 3), max_steps=9)
    resumed = Schedule(plan, PromptSampler(50, plan.prompts_per_generation, True, 3), max_steps=9)
    assert list(whole.steps())[4:] == list(resumed.steps(start=4))
    assert [step.step for step in resumed.steps(start=4)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("epochs", "steps"),
    # 10 prompts in chunks of 4: 2 generations an epoch (2 prompts dropped), 2 steps each.
    [(1.0, 4), (2.0, 8), (1.5, 6), (1.75, 6), (0.1, 1)],
)
def test_epochs_give_the_steps_of_whole_generations(epochs: float, steps: int) -> None:
    plan = BatchPlan(1, 3, 2, 4, 3)
    assert Schedule(plan, PromptSampler(10, 4, True, 0), epochs=epochs).total_steps == steps


def test_max_steps_wins_over_epochs_and_may_be_zero() -> None:
    plan, prompts = BatchPlan(1, 2, 1, 1, 2), PromptSampler(100, 1, True, 0)
    assert Schedule(plan, prompts, epochs=0.29).total_steps == 29  # as it is written: 0.29 * 100 < 29
    assert Schedule(plan, prompts, max_steps=7, epochs=3).total_steps == 7
    assert list(Schedule(plan, prompts, max_steps=0).steps()) == []


def test_each_epoch_has_its_own_order_and_any_generation_can_be_asked_first() -> None:
    sampler = PromptSampler(64, 64, shuffle=True, seed=5)
    first, second = sampler.prompts_for(0), sampler.prompts_for(1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(64))
    assert PromptSampler(64, 64, shuffle=True, seed=5).prompts_for(1) == second
    assert sampler.prompts_for(0) == first
    assert PromptSampler(64, 64, shuffle=True, seed=7).prompts_for(0) not in (first, second)
    incomplete = PromptSampler(10, 4, shuffle=True, seed=0)  # two prompts are left out
    assert incomplete.generations_per_epoch == 2
    epoch = {*incomplete.prompts_for(0), *incomplete.prompts_for(1)}
    assert (len(epoch), epoch < set(range(10))) == (8, True)


def test_data_smaller_than_one_generation_batch_is_refused() -> None:
    problem = problem_of(PromptSampler, 3, 4, shuffle=True, seed=0)
    of_stream = problem_of(stream_sampler, [{"prompt": text} for text in "abc"], size=4)
    assert (problem.key, of_stream.key) == ("data", "data")
    for each in (problem, of_stream):
        assert each.what == "one generation batch needs 4 prompts, but the data has 3"
    assert stream_sampler([{"prompt": text} for text in "abcd"], size=4).prompts_for(1) == [4, 5, 6, 7]


def stream_sampler(rows: list[dict[str, Any]], size: int, shuffle: bool = False) -> StreamSampler:
    dataset = datasets.IterableDataset.from_generator(lambda: iter(rows))
    stream = RowStream(dataset, shuffle, seed=0)
    return StreamSampler(stream, PromptSet(stream, "prompt", byte_tokenizer()), size)


def test_a_stream_drops_no_prompt_at_the_end_of_an_epoch_which_then_is_known() -> None:
    sampler = stream_sampler([{"prompt": str(n)} for n in range(5)], size=2)
    assert 4 / sampler.generations_per_epoch == 0
    drawn = []
    for generation in range(5):
        positions = sampler.prompts_for(generation)
        assert positions == [2 * generation, 2 * generation + 1]
        drawn += [sampler._prompts.prompt(position) for position in positions]
    assert drawn == list("0123401234")
    assert 5 / sampler.generations_per_epoch == 2
    without = stream_sampler([{"prompt": text} for text in ("a", "b", "c", "")], size=2)
    with pytest.raises(RunFailed, match=r"row 3 \(from 0\) of the stream has no prompt"):
        without.prompts_for(1)


@pytest.mark.parametrize(
    ("ranks", "sizes", "key", "given", "nearest"),
    [
        (
            1,
            {"B": 4, "generation_batch_size": 16, "SPG": 4},
            "generation_batch_size",
            "generation_batch_size 16 and steps_per_generation 4",
            "",
        ),
        (2, {"B": 4, "generation_batch_size": 30, "G": 2}, "generation_batch_size", "30", "24 or 32"),
        (2, {"B": 4, "generation_batch_size": 6, "G": 2}, "generation_batch_size", "6", "8"),
        (
            1,
            {"B": 4, "GA": 4, "SPG": 6, "G": 4},
            "steps_per_generation",
            "steps_per_generation 6, gradient_accumulation_steps 4",
            "4 or 8",
        ),
        (1, {"B": 3, "GA": 4, "G": 5}, "num_generations", "5", "4 or 6"),
        (1, {"B": 1, "G": 2}, "num_generations", "2", ""),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    ranks: int, sizes: dict[str, int], key: str, given: str, nearest: str
) -> None:
    problem = problem_of(plan_of, ranks, **sizes)
    assert (problem.key, problem.given, problem.nearest) == (f"train.{key}", given, nearest)


def test_a_refusal_has_the_arithmetic() -> None:
    batch = problem_of(plan_of, 2, B=4, generation_batch_size=30, G=2)
    assert batch.what.endswith("per_device_train_batch_size * world size = 4 * 2 = 8")
    group, alone = problem_of(plan_of, B=3, GA=4, G=5), problem_of(plan_of, B=1, G=2)
    assert "12 completions" in group.what
    assert "3 * 1 * 4" in group.what
    assert group.allowed == "a divisor of 12, at least 2"
    assert alone.allowed == "at least 2, and a larger generation batch"
    both = refused(plan_of, B=3, GA=2, SPG=3, G=4)
    assert [problem.key for problem in both] == ["train.steps_per_generation", "train.num_generations"]


def sampler(prompts: int = 10, shuffle: bool = True) -> PromptSampler:
    """Batches of four prompts."""
    return PromptSampler(prompts, 4, shuffle, seed=3)


@pytest.mark.parametrize("prompts", [4, 8, 10, 11])
def test_without_further_prompts_batches_are_the_schedules(prompts: int) -> None:
    """Both drop the rest of an epoch."""
    draws, schedule = PromptCursor(sampler(prompts)), sampler(prompts)
    assert [draws.batch() for _ in range(9)] == [schedule.prompts_for(generation) for generation in range(9)]


def test_further_prompts_are_the_next_and_a_batch_begins_in_the_epoch_that_it_ends_in() -> None:
    draws = PromptCursor(sampler(10, shuffle=False))
    assert draws.batch() == [0, 1, 2, 3]
    assert [draws.more(2), draws.more(1)] == [[4, 5], [6]]
    assert (draws.position, draws.epoch) == (7, 0.7)
    assert draws.batch() == [0, 1, 2, 3]  # of the next epoch: three are dropped
    draws.batch()
    assert draws.position == 18
    assert draws.more(4) == [8, 9, 0, 1]
    assert draws.epoch == 2.2


def test_each_epoch_has_its_own_order_whatever_was_drawn_from_the_one_before() -> None:
    plain, order = PromptCursor(sampler(8)), sampler(8)
    plain.batch(), plain.more(1)
    second = order.prompts_for(2) + order.prompts_for(3)
    assert plain.batch() + plain.batch() == second


def test_a_run_goes_on_where_it_was() -> None:
    stream = partial(stream_sampler, [{"prompt": text} for text in "abcde"], size=2, shuffle=True)
    for made in (sampler, stream):
        whole, resumed = PromptCursor(made()), PromptCursor(made())
        whole.batch(), whole.more(3), whole.batch()
        resumed.restore(whole.position)
        assert resumed.epoch == whole.epoch > 1
        following = [each.batch() + each.more(2) + each.batch() for each in (whole, resumed)]
        assert following[0] == following[1]


def test_a_stream_keeps_the_whole_batch_and_forgets_the_one_before() -> None:
    rows = stream_sampler([{"prompt": text} for text in "abcdef"], size=2)
    draws = PromptCursor(rows)
    assert draws.epoch == 0
    assert draws.batch() + draws.more(2) + draws.more(1) == [0, 1, 2, 3, 4]
    assert [rows._prompts.text(position) for position in range(5)] == list("abcde")
    assert draws.batch() == [5, 6]
    assert len(rows._stream._rows) == 2
    assert draws.epoch == pytest.approx(7 / 6)
