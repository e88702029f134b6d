"""Samples of a step packed into micro-batches: budgets met exactly, kinds, fillers, padding."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from test_packing import Packed, kinds

from grpox.config import TrainConfig
from grpox.contracts import LossInputs, LossOutput, Reduction, Rollout
from grpox.errors import RunFailed
from grpox.policy.batch import FULL_LOGITS, ForwardMode, Sample, collate, samples_of
from grpox.runtime.world import World
from grpox.update.packing import LossTraits, MicroBatchPacker
from grpox.update.policy_update import MicroBatches

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
PADDED = ForwardMode(chunked=True)
PACKED = ForwardMode(chunked=True, packed=True)
SHARED = ForwardMode(chunked=True, shared_width=1000)


class Loss:
    """A loss that is zero where the advantage is."""

    reduction = Reduction.TOKEN_MEAN
    zero_at_zero_advantage = True

    def per_token(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-inputs.advantages * inputs.logprobs)


class Local(Loss):
    reduction = Reduction.LOCAL_TOKEN_MEAN


class Silent(Loss):
    zero_at_zero_advantage = False


class Undeclared:
    reduction = Reduction.TOKEN_MEAN
    per_token = Loss.per_token


@dataclass(frozen=True)
class Beside(World):
    """A rank beside others that tell the same every time; `given` is what it told itself."""

    told: Sequence[Any] = ()
    given: list[Any] = field(default_factory=list)

    def gather(self, items: Any) -> Any:
        self.given.append(list(items))
        return [*items, *self.told]


def samples_with(lengths: Sequence[tuple[int, int]], advantages: Sequence[Any] | None = None) -> list[Sample]:
    """Samples of these lengths of prompts and completions; prompts of one length are the same."""
    rollouts = [
        Rollout(row, 0, (1,) * prompt, tuple(range(10 * row + 2, 10 * row + 2 + completion)), "stop", 0)
        for row, (prompt, completion) in enumerate(lengths)
    ]
    return samples_of(rollouts, advantages or [1.0] * len(lengths))


def packer(mode: ForwardMode = PADDED, loss: Any = None, **settings: Any) -> MicroBatchPacker:
    return MicroBatchPacker.of(TrainConfig(**settings), LossTraits.of(loss or Loss()), mode)


def packed_numbers(made: MicroBatchPacker, *micro_batches: list[Sample]) -> list[list[int]]:
    """The places of the samples in each micro-batch that they are packed into."""
    return [places for _, places in kinds(made.pack(micro_batches, ALONE)[0], micro_batches)]


# -- budgets ---------------------------------------------------------------------------------------------

THREE = [(2, 2), (3, 4), (3, 2)]
"""Rows of 4, 7 and 5 tokens."""


@pytest.mark.parametrize(
    ("mode", "budget", "expected"),
    [
        # Padded to the longest, three rows take 21 positions and two 14; apart, the last two take 10.
        (PADDED, 21, [[1, 2, 0]]),
        (PADDED, 20, [[1, 2], [0]]),
        (PADDED, 14, [[1, 2], [0]]),
        (PADDED, 13, [[1], [2, 0]]),
        (PADDED, 10, [[1], [2, 0]]),
        (PADDED, 9, [[1], [2], [0]]),
        (PADDED, 1, [[1], [2], [0]]),  # a row that is longer than the budget goes alone
        # Packed, they take 7 + 5 + 4 = 16.
        (PACKED, 16, [[1, 2, 0]]),
        (PACKED, 15, [[1, 2], [0]]),
        (PACKED, 12, [[1, 2], [0]]),
        (PACKED, 11, [[1], [2, 0]]),
        # Behind one prompt of 3, the second and third take 3 + 4 + 2 = 9, and two such rows 18.
        (SHARED, 18, [[1, 2, 0]]),
        (SHARED, 17, [[1, 2], [0]]),
        (SHARED, 9, [[1, 2], [0]]),
        (SHARED, 8, [[1], [2], [0]]),
    ],
)
def test_a_budget_that_is_met_exactly_is_not_passed(
    mode: ForwardMode, budget: int, expected: list[list[int]]
) -> None:
    made = packer(mode, max_tokens_per_micro_batch=budget, per_device_train_batch_size=1)
    assert packed_numbers(made, samples_with(THREE)) == expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [[1], [2], [0]]),
        (2, [[1, 2], [0]]),
        (3, [[1, 2, 0]]),
    ],
)
@pytest.mark.parametrize("mode", [PADDED, PACKED, SHARED])
def test_without_a_budget_completions_are_counted(
    mode: ForwardMode, most: int, expected: list[list[int]]
) -> None:
    made = packer(mode, per_device_train_batch_size=most, generation_batch_size=most * 8)
    assert packed_numbers(made, samples_with(THREE)) == expected


@pytest.mark.parametrize(
    ("settings", "rows", "expected"),
    [
        # Four completions of one prompt and one of another: one row of four, and not two rows together.
        ({"per_device_train_batch_size": 4}, [(3, 2), (3, 2), (2, 1), (3, 2), (3, 2)], [[0, 1, 3, 4], [2]]),
        # A shared row holds no more completions than a micro-batch.
        ({"per_device_train_batch_size": 2}, [(3, 2)] * 3, [[0, 1], [2]]),
        # A token of 1000 features is worth 2000 pairs of positions: a prompt of one is shared, for which
        # 61^2 - 2 * 31^2 = 1799 pairs are computed.
        ({"max_tokens_per_micro_batch": 61}, [(1, 30)] * 2, [[0, 1]]),
    ],
)
def test_rows_that_share_a_prompt(
    settings: dict[str, int], rows: list[tuple[int, int]], expected: list[list[int]]
) -> None:
    size = settings.get("per_device_train_batch_size", 8)
    made = packer(SHARED, **settings, generation_batch_size=size * 8)
    assert packed_numbers(made, samples_with(rows)) == expected


def test_rows_of_all_micro_batches_are_sorted_together_longest_first() -> None:
    micro_batches = [samples_with([(2, 1), (2, 5)]), samples_with([(2, 6), (2, 2)])]
    made = packer(per_device_train_batch_size=2, generation_batch_size=16)
    assert packed_numbers(made, *micro_batches) == [[2, 1], [3, 0]]


# -- kinds -----------------------------------------------------------------------------------------------

MIXED = samples_with([(2, 3), (2, 1), (2, 4), (2, 2)], [0.0, -1.0, 1.0, 0.0])


ALL_IN_ONE: dict[str, Any] = {"max_tokens_per_micro_batch": 1000}
PARTLY, OF_TOKENS = (
    samples_with([(2, 3), (2, 1)]),
    samples_with([(2, 2)] * 4, [*np.eye(2, dtype=np.float32), 0.0, 2.0]),
)
PARTLY[0].token_mask[:] = False
for each in OF_TOKENS:
    each.token_mask[:] = [False, True]


@pytest.mark.parametrize(
    ("loss", "settings", "samples", "backward", "expected"),
    [
        # Rows without an advantage go first, as those without a token that counts, or an advantage at one.
        (Loss(), {}, [MIXED], True, [(False, [0, 3]), (True, [2, 1])]),
        (Loss(), {}, [PARTLY], True, [(False, [0]), (True, [1])]),
        (Loss(), {}, [OF_TOKENS], True, [(False, [0, 2]), (True, [1, 3])]),
        (Loss(), ALL_IN_ONE | {"skip_zero_advantage": False}, [MIXED], True, [(True, [2, 0, 3, 1])]),
        # Without an update nothing has a gradient.
        (Loss(), ALL_IN_ONE, [MIXED], False, [(False, [2, 0, 3, 1])]),
        (Loss(), ALL_IN_ONE | {"skip_zero_advantage": False}, [MIXED], False, [(False, [2, 0, 3, 1])]),
        # The micro-batches of the schedule.
        (Local(), {}, [MIXED, PARTLY[1:]], True, [(True, [0, 1, 2, 3]), (True, [4])]),
        (Local(), {}, [MIXED, PARTLY[1:]], False, [(False, [0, 1, 2, 3]), (False, [4])]),
    ],
)
def test_micro_batches_that_need_a_backward_pass(
    loss: Any, settings: dict[str, Any], samples: MicroBatches, backward: bool, expected: Any
) -> None:
    packed, _ = packer(loss=loss, **settings).pack(samples, ALONE, backward)
    assert kinds(packed, samples) == expected


def test_a_step_without_any_advantage_has_one_gradient_in_which_nothing_counts() -> None:
    samples = samples_with([(2, 5), (3, 1), (2, 3)], [0.0] * 3)
    packed, _ = packer().pack([samples], Beside(0, 2, CPU, told=[(1, 0, 10, 10)]))
    assert kinds(packed, [samples]) == [(False, [0, 2, 1]), (True, [])]
    filler = collate(packed[-1][0], CPU)
    assert not filler.token_mask.any()
    assert filler.input_ids.shape == (1, 4)  # the shortest row, for the least to compute
    assert all(sample.token_mask.all() for sample in samples)


@pytest.mark.parametrize(
    ("told", "idle", "teaching"),
    [
        ((0, 0, 1, 1), 1, 1),
        ((1, 1, 1, 1), 1, 1),
        ((3, 1, 1, 1), 3, 1),
        ((1, 4, 1, 1), 1, 4),
        ((0, 2, 1, 1), 1, 2),
    ],
)
def test_every_rank_has_as_many_micro_batches_of_each_kind_as_any(
    told: tuple[int, int, int, int], idle: int, teaching: int
) -> None:
    world = Beside(0, 2, CPU, told=[told])
    packed, _ = packer().pack([MIXED], world)
    assert [needs_backward for _, needs_backward in packed] == [False] * idle + [True] * teaching
    places = [places for _, places in kinds(packed, [MIXED])]
    fillers = [samples for (samples, _), own in zip(packed, places, strict=True) if not own]
    assert len(fillers) == idle + teaching - 2
    for samples in fillers:
        batch = collate(samples, CPU)
        assert batch.input_ids.shape == (1, 3)
        assert not batch.token_mask.any()
    # Two micro-batches of its own, of 5 + 4 and 6 + 3 tokens on 2 * 5 and 2 * 6 positions.
    assert world.given == [[(1, 1, 18, 22)]]


# -- padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "computed"),
    [(PADDED, 3 * 7), (PACKED, 16), (SHARED, 2 * 9)],
)
def test_padding_is_the_part_of_what_is_computed_that_holds_no_token(mode: ForwardMode, computed: int) -> None:
    real = 9 + 4 if mode is SHARED else 16
    for others, fraction in (
        ([], 1 - real / computed),
        ([(0, 1, 30, 40), (0, 1, 5, 10)], 1 - (real + 35) / (computed + 50)),
    ):
        world = Beside(0, 1 + len(others), CPU, told=others)
        assert packer(mode).pack([samples_with(THREE)], world)[1] == pytest.approx(fraction)
        assert world.given == [[(0, 1, real, computed)]]


@pytest.mark.parametrize(
    ("mode", "rows", "real", "computed"),
    [
        # Plain: prompts are padded to 3 and completions to 4; 6 = 3 + 3 of the other micro-batch is one row.
        (FULL_LOGITS, THREE, 16 + 6, 3 * 7 + 6),
        (PADDED, THREE, 16 + 6, 3 * 7 + 6),
        (PACKED, THREE, 16 + 6, 16 + 6),
        (SHARED, THREE, 13 + 6, 2 * 9 + 6),
        # Left and right: a prompt of 4 and a completion of 5 make 9 columns, though no row is longer than 6.
        (FULL_LOGITS, [(4, 1), (1, 5)], 11 + 6, 18 + 6),
    ],
)
def test_padding_of_the_schedules_micro_batches(
    mode: ForwardMode, rows: list[tuple[int, int]], real: int, computed: int
) -> None:
    world = Beside(0, 2, CPU, told=[(0, 0, 3, 9)])
    _, padding = packer(mode, Local()).pack([samples_with(rows), samples_with([(3, 3)])], world)
    assert world.given == [[(0, 0, real, computed)]]
    assert padding == pytest.approx(1 - (real + 3) / (computed + 9))


def test_auto_is_a_budget_on_a_gpu_and_for_no_loss_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainConfig().max_tokens_per_micro_batch == "auto"
    budgets = {}
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for loss in (Loss(), Local()):
            made = MicroBatchPacker.of(TrainConfig(), LossTraits.of(loss), PADDED)
            budgets[gpu, type(loss)] = made.budget
    assert budgets == {(False, Loss): None, (False, Local): None, (True, Loss): 16_384, (True, Local): None}


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "mode", "settings", "keeps", "skips"),
    [
        (Loss(), PADDED, {}, False, True),
        (Loss(), FULL_LOGITS, {}, False, True),
        (Loss(), PADDED, {"beta": 0.01}, True, False),
        (Loss(), PADDED, {"entropy_coef": 0.01}, True, False),
        (Loss(), PADDED, {"router_aux_loss_coef": 0.1}, True, False),
        (Loss(), PADDED, {"skip_zero_advantage": False}, True, False),
        (Silent(), PADDED, {}, True, False),
        (Undeclared(), PADDED, {}, True, False),
        # What else there is to gain from cutting anew:
        (Silent(), SHARED, {}, False, False),
        (Silent(), PADDED, {"max_tokens_per_micro_batch": 1}, False, False),
        (Loss(), SHARED, {"beta": 0.01}, False, False),
        # A loss of micro-batches keeps them.
        (Local(), PADDED, {}, True, False),
        (Local(), SHARED, {"max_tokens_per_micro_batch": 9}, True, False),
    ],
)
def test_steps_are_packed_anew_where_that_saves_something(
    loss: Any, mode: ForwardMode, settings: dict[str, Any], keeps: bool, skips: bool
) -> None:
    train = TrainConfig(**settings)
    made = MicroBatchPacker.of(train, LossTraits.of(loss), mode)
    assert (made.keeps_schedule, made.skips_backward) == (keeps, skips)
    assert made.train is train
    assert made.mode is mode


# -- whole groups ----------------------------------------------------------------------------------------

GROUP = 4


def groups_of(seed: int) -> list[list[Sample]]:
    """Three micro-batches of two groups; of each third group no sequence has an advantage, of others some."""
    rng, samples = random.Random(seed), []
    for group in range(6):
        prompt = tuple(rng.randrange(3, 100) for _ in range(rng.randint(1, 6)))
        for place in range(GROUP):
            length = rng.randint(1, 9)
            advantage = 0.0 if group % 3 == 0 or place % 2 else rng.choice([-1.0, 0.5])
            mask, logprobs = np.ones(length, np.bool_), np.zeros(length, np.float32)
            sample = Sample(prompt, tuple(range(length)), mask, logprobs, advantage)
            sample.group_id, sample.sequence_id = group, GROUP * group + place
            samples.append(sample)
    return [samples[at : at + 2 * GROUP] for at in range(0, 6 * GROUP, 2 * GROUP)]


def of_groups(mode: ForwardMode = PADDED, silent: bool = True, **settings: Any) -> MicroBatchPacker:
    train = TrainConfig(per_device_train_batch_size=2 * GROUP, num_generations=GROUP, **settings)
    traits = LossTraits(Reduction.TOKEN_MEAN, zero_at_zero_advantage=silent, whole_groups=True)
    return MicroBatchPacker.of(train, traits, mode)


def ids_of(packed: Packed) -> list[list[int]]:
    """The numbers of the sequences of each micro-batch, whose groups are whole and in order."""
    ids: list[list[int]] = []
    for samples, _ in packed:
        assert set(Counter(sample.group_id for sample in samples).values()) == {GROUP}
        ids.append([sample.sequence_id for sample in samples if sample.sequence_id is not None])
        assert min(ids[-1]) < 0 or ids[-1] == sorted(ids[-1])
    return ids


@pytest.mark.parametrize("budget", [None, 60, 90])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("mode", [PADDED, PACKED, ForwardMode(chunked=True, shared_width=32), FULL_LOGITS])
def test_no_group_is_parted_lost_or_doubled(mode: ForwardMode, silent: bool, budget: int | None) -> None:
    for seed in range(20):
        packed, _ = of_groups(mode, silent, max_tokens_per_micro_batch=budget).pack(groups_of(seed), ALONE)
        assert sorted(itertools.chain(*ids_of(packed))) == list(range(24))
        # A group needs a backward pass if one of its sequences does.
        of_silent = {s.group_id for samples, needs_backward in packed if not needs_backward for s in samples}
        assert of_silent == ({0, 3} if silent else set())


@pytest.mark.parametrize("mode", [PADDED, ForwardMode(chunked=True, shared_width=32)])
def test_a_filler_is_a_whole_group_in_which_no_token_counts(mode: ForwardMode) -> None:
    micro_batches = groups_of(3)
    packed, _ = of_groups(mode).pack(micro_batches, Beside(0, 2, CPU, told=[(3, 4, 1, 1)]))
    assert [needs_backward for _, needs_backward in packed] == [False] * 3 + [True] * 4
    ids_of(packed)
    real = {id(sample) for sample in itertools.chain.from_iterable(micro_batches)}
    fillers = [s for samples, _ in packed for s in samples if id(s) not in real]
    assert fillers
    for sample in fillers:
        assert not sample.token_mask.any()
        assert sample.group_id is not None
        assert sample.sequence_id is not None
        assert max(sample.group_id, sample.sequence_id) < 0


def test_a_step_without_advantages_has_a_backward_pass_over_a_group() -> None:
    micro_batches = groups_of(4)
    for sample in itertools.chain.from_iterable(micro_batches):
        sample.advantage = 0.0
    packed, _ = of_groups().pack(micro_batches, ALONE)
    assert [len(samples) for samples, needs_backward in packed if needs_backward] == [GROUP]


def test_a_group_larger_than_a_micro_batch_may_be_ends_the_run_with_both_numbers() -> None:
    micro_batches = groups_of(5)
    samples = list(itertools.chain.from_iterable(micro_batches))
    groups = [samples[at : at + GROUP] for at in range(0, 24, GROUP)]
    largest = max(GROUP * max(map(len, group)) for group in groups)
    of_groups(max_tokens_per_micro_batch=largest).pack(micro_batches, ALONE)
    with pytest.raises(RunFailed, match=f"is {largest - 1}, and a group of 4 completions takes {largest}"):
        of_groups(max_tokens_per_micro_batch=largest - 1).pack(micro_batches, ALONE)


def test_the_scope_of_a_loss_makes_its_groups_whole() -> None:
    class OfGroups(Loss):
        scope = "group"

    assert LossTraits.of(OfGroups()).whole_groups
    assert packer(FULL_LOGITS, OfGroups()).whole_groups
