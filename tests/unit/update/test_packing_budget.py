"""Samples of a step packed into micro-batches: budgets met exactly, kinds, fillers, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from test_packing import kinds

from grpox.config import TrainConfig
from grpox.contracts import LossInputs, LossOutput, Reduction, Rollout
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


def test_rows_that_share_a_prompt_count_by_their_completions() -> None:
    """Four completions of one prompt and one of another: one row of four, and not two rows together."""
    made = packer(SHARED, per_device_train_batch_size=4, generation_batch_size=32)
    rows = [(3, 2), (3, 2), (2, 1), (3, 2), (3, 2)]
    assert packed_numbers(made, samples_with(rows)) == [[0, 1, 3, 4], [2]]


def test_a_shared_row_holds_no_more_completions_than_a_micro_batch() -> None:
    made = packer(SHARED, per_device_train_batch_size=2, generation_batch_size=16)
    assert packed_numbers(made, samples_with([(3, 2)] * 3)) == [[0, 1], [2]]


def test_a_prompt_is_shared_where_the_models_width_makes_it_pay() -> None:
    """A token of 1000 features is worth 2000 pairs of positions; 61^2 - 2 * 31^2 = 1799 are computed for it."""
    made = packer(SHARED, max_tokens_per_micro_batch=61)
    assert packed_numbers(made, samples_with([(1, 30)] * 2)) == [[0, 1]]


def test_rows_of_all_micro_batches_are_sorted_together_longest_first() -> None:
    micro_batches = [samples_with([(2, 1), (2, 5)]), samples_with([(2, 6), (2, 2)])]
    made = packer(per_device_train_batch_size=2, generation_batch_size=16)
    assert packed_numbers(made, *micro_batches) == [[2, 1], [3, 0]]


# -- kinds -----------------------------------------------------------------------------------------------

MIXED = samples_with([(2, 3), (2, 1), (2, 4), (2, 2)], [0.0, -1.0, 1.0, 0.0])


def assert_kinds(
    made: MicroBatchPacker,
    micro_batches: MicroBatches,
    *expected: tuple[bool, list[int]],
    backward: bool = True,
) -> None:
    packed, _ = made.pack(micro_batches, ALONE, backward)
    assert kinds(packed, micro_batches) == list(expected)


def test_rows_without_advantage_go_first_and_have_no_gradient() -> None:
    assert_kinds(packer(), [MIXED], (False, [0, 3]), (True, [2, 1]))


def test_rows_without_a_token_that_counts_have_no_gradient() -> None:
    samples = samples_with([(2, 3), (2, 1)])
    samples[0].token_mask[:] = False
    assert_kinds(packer(), [samples], (False, [0]), (True, [1]))
    samples[0].token_mask[1] = True
    assert_kinds(packer(), [samples], (True, [0, 1]))


def test_advantages_at_tokens_that_do_not_count_have_no_gradient() -> None:
    samples = samples_with(
        [(2, 2)] * 4, [np.array(each, np.float32) for each in ([0, 1], [1, 0], [0, 0])] + [2.0]
    )
    for sample in samples:
        sample.token_mask[:] = [True, False]
    assert_kinds(packer(), [samples], (False, [0, 2]), (True, [1, 3]))


def test_a_run_that_skips_nothing_has_a_gradient_of_all() -> None:
    made = packer(skip_zero_advantage=False, max_tokens_per_micro_batch=1000)
    assert_kinds(made, [MIXED], (True, [2, 0, 3, 1]))


@pytest.mark.parametrize("settings", [{}, {"skip_zero_advantage": False}])
def test_where_nothing_is_updated_nothing_has_a_gradient(settings: dict[str, Any]) -> None:
    made = packer(max_tokens_per_micro_batch=1000, **settings)
    assert_kinds(made, [MIXED], (False, [2, 0, 3, 1]), backward=False)


@pytest.mark.parametrize("backward", [True, False])
def test_the_micro_batches_of_the_schedule_have_a_gradient_where_there_is_an_update(backward: bool) -> None:
    micro_batches = [MIXED, samples_with([(2, 1)])]
    expected = (backward, [0, 1, 2, 3]), (backward, [4])
    assert_kinds(packer(loss=Local()), micro_batches, *expected, backward=backward)


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
    ("mode", "real", "computed"),
    [
        # Plain: prompts are padded to 3 and completions to 4; 6 = 3 + 3 of the other micro-batch is one row.
        (FULL_LOGITS, 16 + 6, 3 * 7 + 6),
        (PADDED, 16 + 6, 3 * 7 + 6),
        (PACKED, 16 + 6, 16 + 6),
        (SHARED, 13 + 6, 2 * 9 + 6),
    ],
)
def test_padding_of_the_schedules_micro_batches(mode: ForwardMode, real: int, computed: int) -> None:
    world = Beside(0, 2, CPU, told=[(0, 0, 3, 9)])
    _, padding = packer(mode, Local()).pack([samples_with(THREE), samples_with([(3, 3)])], world)
    assert world.given == [[(0, 0, real, computed)]]
    assert padding == pytest.approx(1 - (real + 3) / (computed + 9))


def test_padding_of_a_plain_forward_is_left_and_right() -> None:
    """A prompt of 4 and a completion of 5 that are of two rows: 9 columns, though no row is longer than 6."""
    world = Beside(0, 1, CPU)
    packer(FULL_LOGITS, Local()).pack([samples_with([(4, 1), (1, 5)])], world)
    assert world.given == [[(0, 0, 11, 18)]]


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
