"""Contract of every advantage scaler, as a suite of checks.

from grpox.testing import AdvantageConformance

class TestMine(AdvantageConformance):
    component = "mine"
    columns = {"difficulty": 0.5}                         # of the dataset, the same in every row
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import Rollout, Turn
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.dynamic_sampling import signal_of
from grpox.rollout.rewards.scoring import ScoredRow
from grpox.rollout.turns import ZERO, BatchScaler, ScoredBatch
from grpox.runtime.foreign_code import call
from grpox.testing.conformance import Conformance, Violation, require
from grpox.testing.devices import device_problem
from grpox.testing.direction import check_monotone
from grpox.testing.formula import Reference, compare_advantage

close = partial(torch.allclose, rtol=1e-4, atol=1e-5)
"""True if two float32 tensors differ by the order of sums alone."""
NAN = float("nan")
BY_TURNS = "its advantages come from the rewards of turns"


@dataclass(frozen=True)
class Batch:
    """A generation batch, the input of a scaler."""

    rewards: Tensor  # f32[N, K], NaN where a function abstained
    weights: Tensor  # f32[K]
    group_ids: Tensor  # i64[N]

    def __str__(self) -> str:
        rows = zip(self.group_ids.tolist(), self.rewards.tolist(), strict=True)
        lines = [f"group {group}  rewards {_numbers(row)}" for group, row in rows]
        return "\n".join([*lines, f"weights {_numbers(self.weights.tolist())}"])


def batch(rewards: list[list[float]], group_ids: list[int], weights: list[float] | None = None) -> Batch:
    """Build a batch of these numbers; all weights are 1 by default."""
    tensors = map(torch.tensor, (rewards, weights or [1.0] * len(rewards[0]), group_ids))
    return Batch(*tensors)


ORDINARY = (
    batch([[0.0], [1.0]], [0, 0]),
    batch([[0.0], [1.0], [2.0], [2.5]], [0, 0, 1, 1]),
    batch(
        [[0.0, 1.0], [1.0, 0.5], [0.0, 0.0], [2.0, -1.0], [0.3, 0.7], [1.0, 1.0]],
        [0, 0, 0, 1, 1, 1],
        [1.0, 0.5],
    ),
)
"""From the smallest up."""


class AdvantageConformance(Conformance):
    """The checks of an advantage scaler."""

    kind = "advantage"
    columns: ClassVar[Mapping[str, Any]] = {}
    """For a scaler of the form ``scale(inputs)``: column of the dataset -> its value in every row."""
    reference: ClassVar[Reference | None] = None
    """The paper's formula, as `grpox.testing.same_as` describes it."""

    def build(self) -> Any:
        """Build a scaler; one of the form ``scale(inputs)`` is called on completions of one turn."""
        scaler = super().build()
        return _OfInputs(scaler, ONE_TURN, self.columns) if takes_inputs(scaler) else scaler

    def _goes_by_turns(self) -> bool:
        """Tell whether advantages come from the environment's rewards of turns, and from no reward function."""
        if not isinstance(self.build(), _OfInputs):
            return False
        given, other = batch([[0.0], [1.0]], [0, 0]), batch([[1.0], [0.0]], [0, 0])
        negated = tuple(replace(turn, reward=-(turn.reward or 0.0)) for turn in TWO_TURNS.turns)
        cases = ((TWO_TURNS, given), (replace(TWO_TURNS, turns=negated), given), (TWO_TURNS, other))
        first, by_turns, by_functions = (
            _scale(replace(self.build(), like=like), rewards) for like, rewards in cases
        )
        return close(first, by_functions) and not close(first, by_turns)

    def test_runs(self) -> None:
        """Returns one finite number for each completion, without a gradient."""
        for given in ORDINARY:
            scaled = _scale(self.build(), given)
            shape = tuple(scaled.shape) if isinstance(scaled, Tensor) else type(scaled).__name__
            is_one_each = shape == (len(given.rewards),)
            require(is_one_each, f"it returned {shape}, not one number for each of N rows", given)
            is_plain = scaled.is_floating_point() and not scaled.requires_grad
            require(is_plain, f"it returned {scaled.dtype}, requires_grad={scaled.requires_grad}", given)
            self._finite(given)

    def test_turns(self) -> None:
        """Takes completions of several turns, with a token between them that the model did not write."""
        scaler = self.build()
        if not isinstance(scaler, _OfInputs):
            raise SkipTest("its scale(rewards, weights, group_ids) sees no turns")
        for given in ORDINARY:
            same = torch.equal(*(_scale(replace(self.build(), like=TWO_TURNS), given) for _ in range(2)))
            require(same, "called twice on the same turns, it returned two results", given)
        self.notes.append(f"returns one advantage per {getattr(scaler.scaler, 'per', 'completion')}")

    def test_pure(self) -> None:
        """Returns the same twice, and leaves its inputs as they are."""
        for given in ORDINARY:
            scaler = self.build()
            copied = Batch(given.rewards.clone(), given.weights.clone(), given.group_ids.clone())
            first = _scale(scaler, copied)
            advice = "the core logs them afterwards: copy before an in-place operation"
            for name in ("rewards", "weights", "group_ids"):
                unchanged = torch.equal(getattr(copied, name), getattr(given, name))
                require(unchanged, f"it changes the {name} in place", given, advice)
            again = self.build() if hasattr(scaler, "state_dict") else scaler
            same = torch.equal(first, _scale(again, copied))
            require(same, "called twice on the same rewards, it returned two results", given)

    def test_call_order(self) -> None:
        """Returns the same for a batch whatever it was called on before."""
        scaler = self.build()
        if hasattr(scaler, "state_dict"):
            raise SkipTest("it has a state")
        first = [_scale(self.build(), given) for given in ORDINARY]
        for given, before in reversed(list(zip(ORDINARY, first, strict=True))):
            advice = "keep nothing from one call to the next, or return it from state_dict()"
            same = torch.equal(_scale(scaler, given), before)
            require(same, "after calls on other batches it returns other advantages", given, advice)

    def test_device(self) -> None:
        """Creates its tensors on the device of the rewards."""
        if getattr(self.build(), "per", "completion") != "completion":
            raise SkipTest("advantages of turns and tokens are moved to the CPU")

        def run(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
            given = ORDINARY[-1]
            moved = Batch(move(given.rewards), move(given.weights), move(given.group_ids))
            return [_scale(self.build(), moved)]

        problem, remark = device_problem(run)
        advice = "pass device=rewards.device, or use rewards.new_zeros"
        require(not problem, problem, ORDINARY[-1], advice)
        self.notes.append(remark)

    def test_direction(self) -> None:
        """A better reward within a group gives no smaller advantage, and 0 is between."""
        scaler = self.build()
        if self._goes_by_turns():
            raise SkipTest(BY_TURNS)
        needs_nonnegative = getattr(scaler, "needs_nonnegative_rewards", False)
        check_monotone(self._numbers_of, getattr(scaler, "monotone", True) is False, needs_nonnegative)

    def test_same_as_reference(self) -> None:
        """Is the formula of the reference."""
        reference = type(self).reference
        if reference is None:
            raise SkipTest("no reference is given: see grpox.testing.same_as")
        compare_advantage(self._numbers_of, reference)

    def test_order_of_rows(self) -> None:
        """The order of the rows does not matter: a group's need not follow one another."""
        for given in ORDINARY:
            order = torch.arange(len(given.rewards)).roll(1).flip(0)
            other = replace(given, rewards=given.rewards[order], group_ids=given.group_ids[order])
            advice = (
                "tell groups by group_ids and not by position, as torch.unique(..., return_inverse=True) does"
            )
            self._check_same(given, other, "in another order it gives other advantages", advice, order)

    def test_names_of_groups(self) -> None:
        """Groups may have any numbers."""
        for given in ORDINARY:
            advice = "group_ids are names: number them by torch.unique(group_ids, return_inverse=True)"
            for factor in (7, 720720):  # the second has every divisor up to 16
                renamed = replace(given, group_ids=given.group_ids * factor + 3)
                self._check_same(given, renamed, "the numbers of groups matter", advice)

    def test_groups_of_one_reward(self) -> None:
        """A group whose completions are all alike, or that has one alone, gives finite numbers."""
        self._finite(batch([[1.0]], [0]))
        self._finite(batch([[1.0], [1.0]], [0, 0]))
        self._finite(batch([[0.0], [1.0], [3.0]], [0, 0, 1]))
        flat = _scale(self.build(), batch([[0.7], [0.7]], [0, 0]))
        note = "is not trained on" if not bool((flat != 0).any()) else f"gets advantage {flat[0].item():.3g}"
        self.notes.append(f"a group of equal rewards {note}")

    def test_signal(self) -> None:
        """Takes no signal from a group that dynamic sampling replaces: what `signal` names is equal."""
        try:
            signal = signal_of(super().build())
        except RunFailed as error:
            raise Violation(str(error)) from error
        scaler = self.build()
        if signal == "all":
            alike = batch([[0.1]] * 7, [0] * 7)
            largest = _scale(scaler, alike).abs().max().item()
            what = f"a group of equal rewards has advantages of {largest:.0e}, and dynamic sampling keeps it"
            require(not ZERO < largest < 1e-3, what, alike, "set deviations that are rounding errors to 0")
            return
        alike, sums = batch([[2.0, 0.0]] * 3, [0] * 3, [1.0, 2.0]), [[0.0, 1.0], [2.0, 0.0], [1.0, 0.5]]
        if isinstance(scaler, _OfInputs):
            scaled = _scale(replace(scaler, others=(TWO_TURNS,)), alike)
            what = (
                "equal rewards in different turns have advantages, and dynamic sampling would replace the group"
            )
            require(not bool((scaled.abs() > ZERO).any()), what, alike, 'declare signal = "all"')
        if signal != "sum" or bool((_scale(self.build(), alike) != 0).any()):
            return
        given = batch(sums, [0] * 3, [1.0, 2.0])
        what = "a group of equal weighted sums has advantages, and dynamic sampling would replace it"
        advice = 'declare signal = "functions", for a scaler that scales the functions one by one'
        require(not bool((_scale(self.build(), given).abs() > ZERO).any()), what, given, advice)

    def test_abstentions(self) -> None:
        """A completion that no function scored gets 0, and the others finite numbers."""
        given = batch([[NAN], [0.0], [1.0]], [0, 0, 0])
        advice = "rewards are NaN where a function abstained: use torch.nansum, or mask by rewards.isnan()"
        scaled = self._finite(given, advice)[0].item()
        require(scaled == 0, f"a completion without a score gets advantage {scaled:g}, not 0", given, advice)
        self._finite(batch([[NAN, 1.0], [0.0, 0.0], [1.0, NAN]], [0, 0, 0]), advice)
        self._finite(batch([[NAN], [NAN]], [0, 0]), advice)

    def test_weight_of_zero(self) -> None:
        """A reward function of weight 0 changes nothing: it is there to be logged."""
        for given in ORDINARY:
            useless = torch.arange(len(given.rewards), dtype=torch.float32).unsqueeze(1)
            rewards = torch.cat([given.rewards, useless], 1)
            wider = replace(given, rewards=rewards, weights=torch.cat([given.weights, torch.zeros(1)]))
            advice = "weigh by `weights` before anything is summed or scaled over functions"
            self._check_same(given, wider, "a function of weight 0 counts", advice)

    def test_weights(self) -> None:
        """Weights decide between functions that disagree, and one that always abstains counts as absent."""
        if self._goes_by_turns():
            raise SkipTest(BY_TURNS)
        given = batch([[1.0, 0.0], [0.0, 1.0]], [0, 0], [1.0, 0.25])
        other = replace(given, weights=given.weights.flip(0))
        first, second = (_scale(self.build(), each) for each in (given, other))
        advice = "weigh by `weights` before anything is summed or scaled over functions"
        require(not close(first, second), "with other weights it gives the same advantages", given, advice)
        for given in ORDINARY:
            absent = torch.full((len(given.rewards), 1), NAN)
            wider = replace(
                given,
                rewards=torch.cat([given.rewards, absent], 1),
                weights=torch.cat([given.weights, torch.ones(1)]),
            )
            advice = "rewards are NaN where a function abstained: it adds nothing, to sums as to counts"
            self._check_same(given, wider, "a function that abstained from all counts", advice)

    def test_unscored_completions(self) -> None:
        """A completion that no function scored changes no other's advantage, and a batch of them is all 0."""
        for given in ORDINARY:
            unscored = torch.full((1, given.rewards.shape[1]), NAN)
            longer = replace(
                given,
                rewards=torch.cat([given.rewards, unscored]),
                group_ids=torch.cat([given.group_ids, given.group_ids[:1]]),
            )
            before, after = (_scale(self.build(), each) for each in (given, longer))
            advice = "it belongs to no mean, spread or count: mask by rewards.isnan().all(1)"
            require(close(before, after[:-1]), "one that nobody scored changes the others'", longer, advice)
            nothing = replace(given, rewards=torch.full_like(given.rewards, NAN))
            zero = not bool((_scale(self.build(), nothing) != 0).any())
            require(zero, "where nobody scored anything, advantages are not 0", nothing, advice)

    def test_large_and_small_rewards(self) -> None:
        """Rewards of 10,000 and differences of a millionth give finite numbers."""
        lowest = 0.0 if getattr(self.build(), "needs_nonnegative_rewards", False) else -1e4
        for given in (batch([[1e4], [lowest]], [0, 0]), batch([[0.5], [0.500001]], [0, 0])):
            self._finite(given, "a division by a spread that may be 0: add an epsilon")

    def test_what_it_depends_on(self) -> None:
        """Reports if an advantage depends on more than its own group."""
        given = batch([[0.0], [1.0], [2.0], [2.5]], [0, 0, 1, 1])
        other = batch([[0.0], [1.0], [3.0], [9.0]], [0, 0, 1, 1])
        alone = close(_scale(self.build(), given)[:2], _scale(self.build(), other)[:2])
        self.notes.append(f"depends on its own group{'' if alone else ' and on the others of the batch'}")

    def _numbers_of(
        self, rewards: Sequence[Sequence[float]], weights: Sequence[float], groups: Sequence[int]
    ) -> list[float]:
        rows = [list(row) for row in rewards]
        scaled: list[float] = _scale(self.build(), batch(rows, list(groups), list(weights))).tolist()
        return scaled

    def _finite(self, given: Batch, advice: str = "") -> Tensor:
        scaled = _scale(self.build(), given)
        example = f"{given}\nadvantages {_numbers(scaled.tolist())}"
        require(bool(scaled.isfinite().all()), "its advantages are not all finite", example, advice)
        return scaled

    def _check_same(self, given: Batch, other: Batch, what: str, advice: str, order: Any = ...) -> None:
        """Compare the advantages of two batches, the second of which has the rows `order` of the first."""
        same = close(_scale(self.build(), other), _scale(self.build(), given)[order])
        require(same, what, other, advice)


ONE_TURN = Rollout(0, 0, (1,), (2, 3, 4), "stop", 0)
TWO_TURNS = replace(
    ONE_TURN,
    completion_ids=(2, 3, 4, 5),
    model_mask=(True, True, False, True),
    turns=(Turn(0, 2, "stop", 0, 0.5, "begin"), Turn(3, 4, "stop", 0, -1.0, "middle")),
)
STEPS = (0.0, 0.25, 0.0, -0.5)
"""Rewards of the tokens of `TWO_TURNS`."""


@dataclass(frozen=True)
class _OfInputs:
    """A scaler of the form ``scale(inputs)``, called in the other form on completions that are all alike."""

    scaler: Any
    like: Rollout
    columns: Mapping[str, Any]
    others: tuple[Rollout, ...] = ()
    """Completions of a batch that are unlike the first, in turn with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """f32[N]; the mean over a completion's tokens where they have different advantages.

        Raises:
            RunFailed: as in a run.
        """
        groups, named = group_ids.tolist(), tuple(getattr(self.scaler, "example_labels", ("steps",)))
        labels = [*named, *(f"reward {place}" for place in range(len(named), rewards.shape[1]))]
        likes = itertools.cycle((self.like, *self.others))
        rows = [
            ScoredRow(
                replace(like, group_id=group, sample=row), (), (), {}, token_rewards=self._steps(like, own)
            )
            for row, (group, own, like) in enumerate(zip(groups, rewards.tolist(), likes, strict=False))
        ]
        columns = self._columns(len(rows))
        indices = range(10, 11 + max(groups))  # the dataset's row of each group's prompt
        batch = ScoredBatch(
            rows, rewards, weights, group_ids, indices, lambda: columns, 1, labels[: rewards.shape[1]]
        )
        return BatchScaler(self.scaler).scale_inputs(batch).values

    def _steps(self, like: Rollout, rewards: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Return the rewards of a row's tokens by label: of a named function its reward, at the last token."""
        named = getattr(self.scaler, "example_labels", None)
        if named is None:
            return {"steps": STEPS} if self.like.turns else {}
        before = len(like.completion_ids) - 1
        steps = {}
        for label, reward in zip(named, rewards, strict=False):
            steps[label] = (NAN,) * (before + 1) if math.isnan(reward) else (*(0.0,) * before, reward)
        return steps

    def _columns(self, count: int) -> dict[str, list[Any]]:
        examples = getattr(self.scaler, "example_columns", {})
        columns = {name: values[0] for name, values in examples.items()} | dict(self.columns)
        return {name: [value] * count for name, value in columns.items()}


def _numbers(values: list[float]) -> str:
    return "  ".join(f"{value:g}" for value in values)


def _scale(scaler: Any, given: Batch) -> Tensor:
    try:
        scaled: Tensor = call("advantage", scaler.scale, given.rewards, given.weights, given.group_ids)
    except RunFailed as error:
        raise Violation(str(error), str(given)) from error
    return scaled
