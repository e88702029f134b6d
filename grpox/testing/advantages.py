"""Contract of every advantage scaler, as a suite of checks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import Rollout, ScoredRollout, Turn
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.advantages import ZERO, BatchScaler, advantage_inputs
from grpox.rollout.dynamic_sampling import signal_of
from grpox.runtime.foreign_code import call
from grpox.testing.conformance import TensorConformance, Violation, require
from grpox.testing.formula import Reference, parameters_of

close = partial(torch.allclose, rtol=1e-4, atol=1e-5)
"""True if two float32 tensors differ by the order of sums alone."""
NAN = float("nan")
BY_TURNS = "its advantages come from the rewards of turns"


@dataclass(frozen=True)
class ScalerCase:
    """A generation batch, the input of a scaler."""

    rewards: Tensor  # f32[N, K], NaN where a function abstained
    weights: Tensor  # f32[K]
    group_ids: Tensor  # i64[N]

    def __str__(self) -> str:
        return self.with_advantages(None)

    def with_advantages(self, advantages: Tensor | None) -> str:
        """Write the batch as text, a line for each completion, with its advantage."""
        lines = []
        for row, (group, rewards) in enumerate(zip(self.group_ids, self.rewards.tolist(), strict=True)):
            own = "" if advantages is None else f"  advantage {float(advantages[row]):.6g}"
            lines.append(f"row {row}  group {int(group)}  rewards {_numbers(rewards)}{own}")
        return "\n".join([*lines, f"weights {_numbers(self.weights.tolist())}"])

    def is_better(self, row: int, other: int) -> bool:
        """Tell whether no function rates `row` lower than `other` of its group, by the signs of the weights."""
        gains = self.weights * (self.rewards[row] - self.rewards[other])
        return bool(self.group_ids[row] == self.group_ids[other] and gains.min() >= 0 and gains.max() > 0)


def batch(rewards: list[list[float]], group_ids: list[int], weights: list[float] | None = None) -> ScalerCase:
    """Build a batch of these numbers; all weights are 1 by default."""
    tensors = map(torch.tensor, (rewards, weights or [1.0] * len(rewards[0]), group_ids))
    return ScalerCase(*tensors)


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
DIFFERENT = (
    batch([[-1.0], [1.0]], [0, 0]),
    batch([[0.0], [1.0]], [0, 0]),
    batch([[1.0], [0.0]], [0, 0], [-1.0]),
    batch([[0.0], [0.0], [1.0]], [0, 0, 0]),
    batch([[0.5], [2.0], [-1.0], [0.75]], [0, 0, 0, 0]),
    batch([[5.0], [0.0], [7.0], [1.0]], [0, 1, 0, 1]),
    batch([[0.0, 1.0], [1.0, 1.0], [1.0, 2.0], [0.0, 0.0]], [0, 0, 0, 0], [1.0, 0.5]),
)
"""From the smallest up. In each, the first group's rewards differ."""


class AdvantageConformance(TensorConformance):
    """The checks of an advantage scaler."""

    kind = "advantage"
    _results = "advantages"
    _tolerances = (1e-4, 1e-5)
    _device_advice = "pass device=rewards.device, or use rewards.new_zeros"
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

    def test_direction(self) -> None:
        """A better reward within a group gives no smaller advantage, and 0 is between."""
        scaler = self.build()
        if self._goes_by_turns():
            raise SkipTest(BY_TURNS)
        if getattr(scaler, "monotone", True) is False:
            raise SkipTest("it declares monotone = False")
        refuses = getattr(scaler, "needs_nonnegative_rewards", False)
        batches = [each for each in DIFFERENT if not refuses or bool((each.rewards @ each.weights >= 0).all())]
        advice = "check the sign: A grows with the reward. If that is not the point, declare monotone = False"
        for given in batches:
            scaled = _scale(self.build(), given)
            for worse, better in itertools.permutations(range(len(scaled)), 2):
                is_wrong = given.is_better(better, worse) and bool(scaled[better] < scaled[worse] - 1e-6)
                what = f"row {better} has a better reward than row {worse} of its group"
                what += ", and a smaller advantage"
                require(not is_wrong, what, given.with_advantages(scaled), advice)
        scaled = _scale(self.build(), batches[0])
        worst, best = scaled.tolist()
        what = f"a worse and a better reward get advantages {worst:g} and {best:g}, not around 0"
        # A baseline may be one of the rewards, as a quantile is.
        require(worst <= 0 <= best and worst < best, what, batches[0].with_advantages(scaled), advice)

    def test_same_as_reference(self) -> None:
        """Is the formula of the reference."""
        names = parameters_of(self._formula, ("rewards", "weights", "groups"))
        for given in _random_batches():
            try:
                scaled = _scale(self.build(), given)
            except Violation:
                if bool((given.rewards < 0).any()):  # a scaler may refuse rewards below 0
                    continue
                raise
            known = [[None if math.isnan(each) else each for each in row] for row in given.rewards.tolist()]
            groups, weights = given.group_ids.tolist(), given.weights.tolist()
            arguments = {"rewards": known, "weights": weights, "groups": groups}
            expected = [float(value) for value in self._formula(**{name: arguments[name] for name in names})]
            example = given.with_advantages(scaled)
            what = f"the reference returned {len(expected)} numbers for {len(known)} completions"
            require(len(expected) == len(known), what, example)
            for row, (value, wanted) in enumerate(zip(scaled.tolist(), expected, strict=True)):
                what = f"the advantage of row {row} is {value:.6g}, and that of the reference {wanted:.6g}"
                require(math.isclose(value, wanted, rel_tol=1e-4, abs_tol=1e-5), what, example)

    def test_order_of_rows(self) -> None:
        """The order of the rows does not matter: a group's need not follow one another."""
        for given in ORDINARY:
            order = torch.arange(len(given.rewards)).roll(1).flip(0)
            other = replace(given, rewards=given.rewards[order], group_ids=given.group_ids[order])
            advice = (
                "tell groups by group_ids and not by position, as torch.unique(..., return_inverse=True) does"
            )
            self._check_same(other, given, order, "in another order it gives other advantages", advice)

    def test_names_of_groups(self) -> None:
        """Groups may have any numbers."""
        for given in ORDINARY:
            advice = "group_ids are names: number them by torch.unique(group_ids, return_inverse=True)"
            for factor in (7, 720720):  # the second has every divisor up to 16
                renamed = replace(given, group_ids=given.group_ids * factor + 3)
                self._check_same(renamed, given, ..., "the numbers of groups matter", advice)

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
            self._check_same(wider, given, ..., "a function of weight 0 counts", advice)

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
            self._check_same(wider, given, ..., "a function that abstained from all counts", advice)

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

    def _cases(self) -> list[ScalerCase]:
        return list(ORDINARY)

    def _values(self, component: Any, inputs: ScalerCase) -> list[Tensor]:
        return [_scale(component, inputs)]

    def _after_a_call(self, component: Any) -> Any:
        return self.build() if hasattr(component, "state_dict") else component

    def test_device(self) -> None:
        """Creates its tensors on the device of the rewards."""
        if getattr(self.build(), "per", "completion") != "completion":
            raise SkipTest("advantages of turns and tokens are moved to the CPU")
        super().test_device()

    def _finite(self, given: ScalerCase, advice: str = "") -> Tensor:
        scaled = _scale(self.build(), given)
        example = given.with_advantages(scaled)
        require(bool(scaled.isfinite().all()), "its advantages are not all finite", example, advice)
        return scaled


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
            ScoredRollout(
                rollout=replace(like, group_id=group, sample=row),
                prompt="",
                completion="",
                rewards=dict(zip(labels, own, strict=False)),
                reward=NAN,
                advantage=NAN,
                token_rewards=self._steps(like, own),
            )
            for row, (group, own, like) in enumerate(zip(groups, rewards.tolist(), likes, strict=False))
        ]
        indices = range(10, 11 + max(groups))  # the dataset's row of each group's prompt
        inputs = advantage_inputs(rows, rewards, weights, indices, self._columns(len(rows)), 1)
        return BatchScaler(self.scaler).scale_inputs(rows, inputs).values

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


def _scale(scaler: Any, given: ScalerCase) -> Tensor:
    try:
        scaled: Tensor = call("advantage", scaler.scale, given.rewards, given.weights, given.group_ids)
    except RunFailed as error:
        raise Violation(str(error), str(given)) from error
    return scaled


def _random_batches() -> Iterator[ScalerCase]:
    """Yield generation batches from one completion up: ties, abstentions, interleaved groups, weights."""
    numbers = random.Random(0)
    yield batch([[1.0]], [0])
    yield batch([[0.0], [1.0]], [0, 0])
    yield batch([[0.5], [0.5]], [0, 0])
    yield batch([[NAN], [0.0], [1.0]], [0, 0, 0])
    yield batch([[NAN], [NAN]], [0, 0])
    yield batch([[0.0], [1.0], [3.0]], [0, 0, 0], [2.0])
    yield batch([[0.0, 1.0], [1.0, NAN], [0.5, 0.25]], [0, 0, 0], [1.0, 0.5])
    for size, functions, repeats in ((4, 1, 6), (6, 2, 6), (12, 3, 6), (64, 2, 2)):
        for _ in range(repeats):
            groups = [numbers.randrange(max(1, size // 4)) for _ in range(size)]
            weights = [numbers.choice((1.0, 0.5, 2.0, 0.0, 0.25)) for _ in range(functions)]
            lowest = numbers.choice((None, 0, -80))
            yield batch([[_reward(numbers, lowest) for _ in weights] for _ in groups], groups, weights)


def _reward(numbers: random.Random, lowest: int | None) -> float:
    """Draw sixteenths from `lowest` on, exact in float32, as are their sums; None: 0 or 1. Some are NaN."""
    if numbers.random() < 0.15:
        return math.nan
    return float(numbers.randrange(2)) if lowest is None else numbers.randrange(lowest, 160) / 16
