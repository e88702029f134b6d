"""The state of each rank: read back bit by bit, and resharded over other ranks and micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpox.checkpoint.folders import rank_file
from grpox.checkpoint.progress import TrainingState, fitting, other_batches, same_steps
from grpox.checkpoint.rank_state import (
    Key,
    rank_state,
    read_state,
    restore_rank,
    samples_of_state,
    samples_state,
    write_state,
)
from grpox.checkpoint.rng import fresh_random_state, random_state, set_random_state
from grpox.config import RunConfig
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.policy.batch import Sample, TokenRecord
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World

ALONE = World(0, 1, torch.device("cpu"))
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


def samples(count: int, seed: int, carries: bool = True) -> list[Sample]:
    """Ragged samples: some without a completion, some without log-probabilities of one kind or another.

    Args:
        carries: all but the first carry what only some losses need.
    """
    rng = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    made = []
    for row in range(count):
        length = rng.randint(0, 7)
        made.append(
            Sample(
                prompt=tuple(rng.randrange(1, 17) for _ in range(rng.randint(1, 6))),
                completion=tuple(rng.randrange(1, 17) for _ in range(length)),
                token_mask=np.array([rng.random() < 0.8 for _ in range(length)], np.bool_),
                sampler_logprobs=np.array(
                    [rng.uniform(-3, 0) if row % 5 else np.nan for _ in range(length)], np.float32
                ),
                advantage=rng.uniform(-2, 2)
                if row % 7
                else np.array([rng.uniform(-2, 2) for _ in range(length)], np.float32),
                old_logprobs=torch.randn(length, generator=numbers) if row % 3 else None,
                reference_logprobs=torch.randn(length, generator=numbers) if row % 4 else None,
                policy_keep=torch.rand(length, generator=numbers) < 0.5 if row % 2 else None,
                rewards=np.array([rng.random(), np.nan], np.float32) if carries and row else None,
                group_id=row // 4 if carries and row else None,
                sequence_id=1000 * seed + row if carries and row else None,
                columns={"answer": str(row), "tags": [row, None, {"b": b"c"}]} if carries and row else None,
                observed=row % 3 if row % 3 <= length else 0,
                token_record=TokenRecord(seed, 2, row, 3, np.arange(length, dtype=np.int32) - 1)
                if carries and row % 6 == 5
                else None,
            )
        )
    return made


def held_by(plan: BatchPlan, rank: int) -> dict[Key, Sample]:
    """Samples that a rank has of two generation batches of 48 rows, as the loop keeps them."""
    rows = {generation: samples(48, generation) for generation in (3, 4)}
    return {
        (generation, row): rows[generation][row]
        for generation in (3, 4)
        for micro_batch in schedule(plan).slices_of(generation)
        for row in micro_batch.rank_rows(rank)
    }


def facts(value: Any) -> Any:
    """Type and bytes of an array or tensor, and anything else itself."""
    if isinstance(value, TokenRecord):
        return {name: facts(part) for name, part in vars(value).items()}
    array = value.numpy() if isinstance(value, torch.Tensor) else value
    return (type(value), array.dtype, array.shape, array.tobytes()) if isinstance(array, np.ndarray) else value


def assert_same(found: Sample, wanted: Sample) -> None:
    """Every field equal, bit by bit; a reward may be NaN."""
    one, other = ({**vars(each), "reward": np.float64(each.reward).tobytes()} for each in (found, wanted))
    for name in other:
        assert facts(one[name]) == facts(other[name]), name


def progress_of(plan: BatchPlan) -> Any:
    """Progress of a run that was split by `plan`."""
    train = {
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "steps_per_generation": plan.steps_per_generation,
        "num_generations": plan.num_generations,
    }
    given = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["exact"], "train": train}
    config = RunConfig.model_validate(given).model_dump(mode="json")
    return SimpleNamespace(config=config, world_size=plan.world_size, step=2)


def restored(folder: Path, saved: BatchPlan, plan: BatchPlan, rank: int) -> TrainingState:
    """State of a rank after what `saved` ranks had written, with the process's random numbers as before."""
    state, random_before = TrainingState(), random_state()
    world = World(rank, plan.world_size, torch.device("cpu"))
    restore_rank(state, folder, progress_of(saved), schedule(plan), world, seed=0)
    set_random_state(random_before)
    return state


def write(folder: Path, plan: BatchPlan) -> None:
    """Write the state of every rank of a run that is split by `plan`."""
    for rank in range(plan.world_size):
        state = TrainingState(samples=held_by(plan, rank))
        write_state(rank_state(state, ALONE, PhaseTimes()), rank_file(folder, rank))


@pytest.mark.parametrize("other", [ONE, *OTHERS], ids=str)
def test_samples_in_use_go_where_the_other_split_would_have_put_them(tmp_path: Path, other: BatchPlan) -> None:
    for saved, plan in ((ONE, other), (other, ONE)):
        write(tmp_path, saved)
        for rank in range(plan.world_size):
            found, wanted = restored(tmp_path, saved, plan, rank).samples, held_by(plan, rank)
            assert list(found) == list(wanted)
            for key, sample in wanted.items():
                assert_same(found[key], sample)


@pytest.mark.parametrize("count", [0, 1, 60])
def test_samples_are_read_back_bit_by_bit(tmp_path: Path, count: int) -> None:
    """Row 0 has nothing computed: alone it is a batch without pi_old, reference and kept tokens."""
    wanted = samples(count, seed=1)
    write_state(samples_state(wanted), tmp_path / "samples.pt")
    found = samples_of_state(read_state(tmp_path / "samples.pt"), torch.device("cpu"))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_samples_that_share_memory_are_written_once(tmp_path: Path) -> None:
    """As log-probabilities that a step has cut out of its whole batch."""
    length, whole = 50, torch.randn(100_000)
    kept = Sample((1, 2), (3,) * length, np.ones(length, np.bool_), np.zeros(length, np.float32), 1.0)
    kept.old_logprobs, kept.reference_logprobs = whole[:length], whole[-length:]
    path = tmp_path / "samples.pt"
    write_state(samples_state([kept]), path)
    assert path.stat().st_size < 16_000  # 400,000 bytes are behind the two rows
    assert_same(samples_of_state(read_state(path), torch.device("cpu"))[0], kept)


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
def test_of_other_batches_no_sample_is_kept(change: dict[str, int], tmp_path: Path) -> None:
    other = replace(ONE, **change)
    assert not same_steps(ONE, other)
    write(tmp_path, ONE)
    assert restored(tmp_path, ONE, other, 0).samples == {}


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
    problem = other_batches(ONE, BatchPlan(ranks, 8, 3, 6, 4))
    assert told in problem.allowed
    assert "train.per_device_train_batch_size" in problem.key
    for fits in (1, 2, 3, 4, 6, 8, 12, 24):
        sizes = [int(word.partition("=")[2]) for word in fitting(ONE, fits).split()[:3]]
        assert same_steps(ONE, BatchPlan(fits, *sizes, 4))


def test_a_rank_that_joins_has_numbers_of_its_own() -> None:
    before = random_state()
    states = [fresh_random_state(0, rank, 7)["python"][1] for rank in (1, 2, 1)]
    assert states[0] == states[2] != states[1]
    assert random_state()["python"] == before["python"]


class Gpus:
    """The random states of the GPUs that a process sees, in place of torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own: int, visible: int) -> None:
        self.own = own
        self.states = {device: torch.tensor([device], dtype=torch.uint8) for device in range(visible)}
        doubles = {
            "is_available": lambda: True,
            "current_device": lambda: own,
            "get_rng_state": lambda device: self.states[device].clone(),
            "set_rng_state": lambda state, device: self.states.update({device: state}),
        }
        for name, double in doubles.items():
            monkeypatch.setattr(torch.cuda, name, double)


def test_a_rank_saves_the_numbers_of_its_own_gpu_and_restores_them_where_it_sees_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Gpus(monkeypatch, own=3, visible=8)  # torchrun shows every rank all GPUs of the machine
    state = random_state()
    assert [each.tolist() for each in state["cuda"]] == [[3]]
    alone = Gpus(monkeypatch, own=0, visible=1)  # srun may show each its own
    set_random_state(state)
    assert alone.states[0].tolist() == [3]
    # Of all GPUs in an earlier checkpoint a rank takes its own.
    gpus = Gpus(monkeypatch, own=1, visible=2)
    earlier = random_state() | {"cuda": [torch.tensor([7]), torch.tensor([8])]}
    set_random_state(earlier)
    assert [int(state) for state in gpus.states.values()] == [0, 8]


def test_numbers_of_a_gpu_are_left_out_where_there_is_none() -> None:
    set_random_state(random_state() | {"cuda": [torch.tensor([7], dtype=torch.uint8)]})


def test_samples_carry_what_the_loss_needs_and_earlier_ones_have_no_observed_tokens() -> None:
    assert samples_state(samples(2, seed=0, carries=False))["carried"] == {}
    state = samples_state(samples(20, seed=0))
    assert set(state["carried"]) == {"rewards", "group_id", "sequence_id", "columns"}
    assert set(state.pop("observed")) == {0, 1, 2}
    assert {each.observed for each in samples_of_state(state, torch.device("cpu"))} == {0}
