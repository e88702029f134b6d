"""Rows of a step cut into passes: budgets met exactly, kinds, blanks, padding, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from grpox.config import TrainConfig
from grpox.contracts import LossInputs, LossOutput, Reduction, Rollout
from grpox.policy.batch import collate
from grpox.policy.forward_modes import PLAIN, ForwardWays
from grpox.runtime.world import World
from grpox.update.micro_batch import Slice
from grpox.update.packing import Arrangement, Pass, Passes

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
PADDED = ForwardWays(chunked=True)
PACKED = ForwardWays(chunked=True, packed=True)
SHARED = ForwardWays(chunked=True, shared_width=1000)


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


def slice_of(lengths: Sequence[tuple[int, int]], advantages: Sequence[float] | None = None) -> Slice:
    """Rows of these lengths of prompts and completions; those with prompts of one length share their prompt."""
    rollouts = [
        Rollout(row, 0, (1,) * prompt, tuple(range(10 * row + 2, 10 * row + 2 + completion)), "stop", 0)
        for row, (prompt, completion) in enumerate(lengths)
    ]
    return Slice(collate(rollouts, advantages or [1.0] * len(lengths), 0, CPU))


def arranged(ways: ForwardWays = PADDED, loss: Any = None, **settings: Any) -> Arrangement:
    return Arrangement.of(TrainConfig(**settings), loss or Loss(), ways)


def numbers(passes: Passes) -> list[list[int]]:
    return [list(each.numbers) for each in passes.passes]


# -- budgets ---------------------------------------------------------------------------------------------

THREE = [(2, 2), (3, 4), (3, 2)]
"""Rows of 4, 7 and 5 tokens."""


@pytest.mark.parametrize(
    ("ways", "budget", "expected"),
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
    ways: ForwardWays, budget: int, expected: list[list[int]]
) -> None:
    made = arranged(ways, max_tokens_per_micro_batch=budget, per_device_train_batch_size=1)
    assert numbers(made.passes([slice_of(THREE)], ALONE)) == expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [[1], [2], [0]]),
        (2, [[1, 2], [0]]),
        (3, [[1, 2, 0]]),
    ],
)
@pytest.mark.parametrize("ways", [PADDED, PACKED, SHARED])
def test_without_a_budget_completions_are_counted(
    ways: ForwardWays, most: int, expected: list[list[int]]
) -> None:
    made = arranged(ways, per_device_train_batch_size=most, generation_batch_size=most * 8)
    assert numbers(made.passes([slice_of(THREE)], ALONE)) == expected


def test_rows_that_share_a_prompt_count_by_their_completions() -> None:
    """Four completions of one prompt and one of another: one row of four, and not two rows in one pass."""
    made = arranged(SHARED, per_device_train_batch_size=4, generation_batch_size=32)
    rows = [(3, 2), (3, 2), (2, 1), (3, 2), (3, 2)]
    assert numbers(made.passes([slice_of(rows)], ALONE)) == [[0, 1, 3, 4], [2]]


def test_a_shared_row_holds_no_more_completions_than_a_micro_batch() -> None:
    made = arranged(SHARED, per_device_train_batch_size=2, generation_batch_size=16)
    assert numbers(made.passes([slice_of([(3, 2)] * 3)], ALONE)) == [[0, 1], [2]]


def test_a_prompt_is_shared_where_the_models_width_makes_it_pay() -> None:
    """A token of 1000 features is worth 2000 pairs of positions; 61^2 - 2 * 31^2 = 1799 are computed for it."""
    made = arranged(SHARED, max_tokens_per_micro_batch=61)
    assert numbers(made.passes([slice_of([(1, 30)] * 2)], ALONE)) == [[0, 1]]


def test_rows_of_all_slices_are_sorted_together_longest_first() -> None:
    slices = [slice_of([(2, 1), (2, 5)]), slice_of([(2, 6), (2, 2)])]
    made = arranged(per_device_train_batch_size=2, generation_batch_size=16).passes(slices, ALONE)
    assert numbers(made) == [[2, 1], [3, 0]]
    assert [each.slice.batch.token_mask.sum(1).tolist() for each in made.passes] == [[6, 5], [2, 1]]
    assert made.slices is slices


# -- kinds -----------------------------------------------------------------------------------------------

MIXED = slice_of([(2, 3), (2, 1), (2, 4), (2, 2)], [0.0, -1.0, 1.0, 0.0])


def kinds(passes: Passes) -> list[tuple[bool, list[int]]]:
    return [(each.teaches, list(each.numbers)) for each in passes.passes]


def test_rows_without_advantage_go_first_and_have_no_gradient() -> None:
    assert kinds(arranged().passes([MIXED], ALONE)) == [(False, [0, 3]), (True, [2, 1])]


def test_rows_without_a_token_that_counts_have_no_gradient() -> None:
    slice_ = slice_of([(2, 3), (2, 1)])
    slice_.batch.token_mask[0] = False
    assert kinds(arranged().passes([slice_], ALONE)) == [(False, [0]), (True, [1])]
    slice_.batch.token_mask[0, 1] = True
    assert kinds(arranged().passes([slice_], ALONE)) == [(True, [0, 1])]


def test_a_run_that_skips_nothing_teaches_all() -> None:
    made = arranged(skip_zero_advantage=False, max_tokens_per_micro_batch=1000).passes([MIXED], ALONE)
    assert kinds(made) == [(True, [2, 0, 3, 1])]


@pytest.mark.parametrize("settings", [{}, {"skip_zero_advantage": False}])
def test_where_nothing_is_updated_no_pass_has_a_gradient(settings: dict[str, Any]) -> None:
    made = arranged(max_tokens_per_micro_batch=1000, **settings).passes([MIXED], ALONE, teach=False)
    assert kinds(made) == [(False, [2, 0, 3, 1])]


@pytest.mark.parametrize("teach", [True, False])
def test_the_micro_batches_of_the_schedule_have_a_gradient_where_there_is_an_update(teach: bool) -> None:
    made = arranged(loss=Local()).passes([MIXED, slice_of([(2, 1)])], ALONE, teach)
    assert kinds(made) == [(teach, [0, 1, 2, 3]), (teach, [4])]


def test_a_step_without_any_advantage_has_one_pass_with_a_gradient_in_which_nothing_counts() -> None:
    rows = [(2, 5), (3, 1), (2, 3)]
    world = Beside(0, 2, CPU, told=[(1, 0, 10, 10)])
    made = arranged().passes([slice_of(rows, [0.0] * 3)], world)
    assert kinds(made) == [(False, [0, 2, 1]), (True, [])]
    blank = made.passes[-1].slice.batch
    assert not blank.token_mask.any()
    assert blank.input_ids.shape == (1, 4)  # the shortest row, for the least to compute
    assert made.passes[0].slice.batch.token_mask.any()


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
def test_every_rank_has_as_many_passes_of_each_kind_as_any(
    told: tuple[int, int, int, int], idle: int, teaching: int
) -> None:
    world = Beside(0, 2, CPU, told=[told])
    made = arranged().passes([MIXED], world)
    assert [each.teaches for each in made.passes] == [False] * idle + [True] * teaching
    blanks = [each for each in made.passes if not each.numbers]
    assert len(blanks) == idle + teaching - 2
    for each in blanks:
        assert each.slice.batch.input_ids.shape == (1, 3)
        assert not each.slice.batch.token_mask.any()
    # Two passes of its own, of 5 + 4 and 6 + 3 tokens on 2 * 5 and 2 * 6 positions.
    assert world.given == [[(1, 1, 18, 22)]]


# -- padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ways", "computed"),
    [(PADDED, 3 * 7), (PACKED, 16), (SHARED, 2 * 9)],
)
def test_padding_is_the_part_of_what_is_computed_that_holds_no_token(ways: ForwardWays, computed: int) -> None:
    real = 9 + 4 if ways is SHARED else 16
    for others, fraction in (
        ([], 1 - real / computed),
        ([(0, 1, 30, 40), (0, 1, 5, 10)], 1 - (real + 35) / (computed + 50)),
    ):
        world = Beside(0, 1 + len(others), CPU, told=others)
        made = arranged(ways).passes([slice_of(THREE)], world)
        assert made.padding_fraction == pytest.approx(fraction)
        assert world.given == [[(0, 1, real, computed)]]


@pytest.mark.parametrize(
    ("ways", "real", "computed"),
    [
        # Plain: prompts are padded to 3 and completions to 4, and 6 = 3 + 3 of the other slice is one row.
        (PLAIN, 16 + 6, 3 * 7 + 6),
        (PADDED, 16 + 6, 3 * 7 + 6),
        (PACKED, 16 + 6, 16 + 6),
        (SHARED, 13 + 6, 2 * 9 + 6),
    ],
)
def test_padding_of_the_schedules_micro_batches(ways: ForwardWays, real: int, computed: int) -> None:
    world = Beside(0, 2, CPU, told=[(0, 0, 3, 9)])
    made = arranged(ways, Local()).passes([slice_of(THREE), slice_of([(3, 3)])], world)
    assert world.given == [[(0, 0, real, computed)]]
    assert made.padding_fraction == pytest.approx(1 - (real + 3) / (computed + 9))


def test_padding_of_a_plain_forward_is_left_and_right() -> None:
    """A prompt of 4 and a completion of 5 that are of two rows: 9 columns, though no row is longer than 6."""
    world = Beside(0, 1, CPU)
    arranged(PLAIN, Local()).passes([slice_of([(4, 1), (1, 5)])], world)
    assert world.given == [[(0, 0, 11, 18)]]


# -- arrangement -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "ways", "settings", "fixed", "skips"),
    [
        (Loss(), PADDED, {}, False, True),
        (Loss(), PLAIN, {}, False, True),
        (Loss(), PADDED, {"beta": 0.01}, True, False),
        (Loss(), PADDED, {"entropy_coef": 0.01}, True, False),
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
def test_steps_are_cut_anew_where_that_saves_something(
    loss: Any, ways: ForwardWays, settings: dict[str, Any], fixed: bool, skips: bool
) -> None:
    train = TrainConfig(**settings)
    made = Arrangement.of(train, loss, ways)
    assert (made.fixed, made.skips) == (fixed, skips)
    assert made.train is train
    assert made.ways is ways


# -- the way back ----------------------------------------------------------------------------------------


def two_passes() -> tuple[list[Slice], Passes]:
    """Slices of widths 3 and 4, whose rows 0 and 2 are in one pass of width 4 and row 1 in another of 1."""
    slices = [slice_of([(2, 3), (2, 1)]), slice_of([(2, 4)])]
    made = arranged(per_device_train_batch_size=2, generation_batch_size=16).passes(slices, ALONE)
    assert numbers(made) == [[2, 0], [1]]
    return slices, made


def test_values_of_passes_go_back_to_their_rows_and_are_0_elsewhere() -> None:
    _, made = two_passes()
    first = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.float64)
    spread = made.spread([first, torch.tensor([[9]], dtype=torch.float64)])
    assert [part.tolist() for part in spread] == [[[5, 6, 7], [9, 0, 0]], [[1, 2, 3, 4]]]
    assert spread[0].dtype == torch.float64
    assert [part.tolist() for part in made.spread([None, torch.tensor([[True]])])] == [
        [[False] * 3, [True, False, False]],
        [[False] * 4],
    ]


def test_parts_are_of_their_own_memory() -> None:
    """Else a slice would keep the values of the whole step alive."""
    _, made = two_passes()
    parts = made.spread([torch.ones(2, 4), torch.ones(1, 1)])
    assert all(part.untyped_storage().nbytes() == part.numel() * 4 for part in parts)


def test_a_pass_for_the_other_ranks_gives_nothing_back() -> None:
    world = Beside(0, 2, CPU, told=[(0, 2, 1, 1)])
    made = arranged().passes([slice_of([(2, 2)])], world)
    assert numbers(made) == [[0], []]
    [part] = made.spread([torch.ones(1, 2), torch.full((1, 2), 7.0)])
    assert part.tolist() == [[1, 1]]


def test_a_value_for_each_pass_is_needed() -> None:
    _, made = two_passes()
    with pytest.raises(ValueError, match="shorter"):
        made.spread([torch.ones(2, 4)])


def test_log_probabilities_that_were_fixed_are_kept_under_their_names() -> None:
    slices, made = two_passes()
    for place, each in enumerate(made.passes):
        shape = each.slice.batch.token_mask.shape
        each.slice.old_logprobs = torch.full(shape, -1.0 - place)
        each.slice.policy_keep = torch.ones(shape, dtype=torch.bool)
    made.passes[0].slice.reference_logprobs = torch.full((2, 4), -3.0)
    made.keep()
    assert [None if s.old_logprobs is None else s.old_logprobs.tolist() for s in slices] == [
        [[-1, -1, -1], [-2, 0, 0]],
        [[-1, -1, -1, -1]],
    ]
    assert [None if s.reference_logprobs is None else s.reference_logprobs.tolist() for s in slices] == [
        [[-3, -3, -3], [0, 0, 0]],
        [[-3, -3, -3, -3]],
    ]
    assert [s.policy_keep for s in slices] == [None, None]
    made.keep(["policy_keep"])
    assert slices[1].policy_keep is not None
    assert slices[1].policy_keep.tolist() == [[True] * 4]


def test_what_no_pass_fixed_stays_as_it_was() -> None:
    slices, made = two_passes()
    slices[0].old_logprobs = before = torch.zeros(2, 3)
    made.keep()
    assert slices[0].old_logprobs is before
    assert slices[1].old_logprobs is None


def test_a_pass_of_the_schedule_is_another_slice_of_the_same_tensors() -> None:
    slice_ = slice_of([(2, 2)])
    [made] = arranged(loss=Local()).passes([slice_], ALONE).passes
    assert isinstance(made, Pass)
    assert made.slice.batch is slice_.batch
    made.slice.old_logprobs = torch.zeros(1, 2)
    assert slice_.old_logprobs is None
