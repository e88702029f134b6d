"""Contract of every advantage scaler, as a suite of checks.

from grpox.testing import AdvantageConformance

class TestMine(AdvantageConformance):
    component = "mine"
    columns = {"difficulty": 0.5}                         # of the dataset, the same in every row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.contracts import Rollout, Turn
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.advantages import Advantages, BatchScaler, ScoredBatch
from grpox.rollout.rewards.scoring import ScoredRow
from grpox.runtime.foreign_code import call
from grpox.testing.conformance import Conformance, Violation, require

close = partial(torch.allclose, rtol=1e-4, atol=1e-5)
"""True if two float32 tensors differ by the order of sums alone."""
NAN = float("nan")


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

    def test_runs(self) -> None:
        """Returns one finite number for each completion, without a gradient."""
        for given in ORDINARY:
            scaled = self._scale(self.build(), given)
            shape = tuple(scaled.shape) if isinstance(scaled, Tensor) else type(scaled).__name__
            is_one_each = shape == (len(given.rewards),)
            require(is_one_each, f"it returned {shape}, not one number for each of N rows", given)
            is_plain = scaled.is_floating_point() and not scaled.requires_grad
            require(is_plain, f"it returned {scaled.dtype}, requires_grad={scaled.requires_grad}", given)
            self._finite(given)

    def test_pure(self) -> None:
        """Returns the same twice, and leaves its inputs as they are."""
        scaler = self.build()
        for given in ORDINARY:
            copied = Batch(given.rewards.clone(), given.weights.clone(), given.group_ids.clone())
            first = self._scale(scaler, copied)
            unchanged = torch.equal(copied.rewards, given.rewards) and torch.equal(
                copied.weights, given.weights
            )
            advice = "the core logs them afterwards: copy before an in-place operation"
            require(unchanged, "it changes the rewards or the weights in place", given, advice)
            same = torch.equal(first, self._scale(scaler, copied))
            require(same, "called twice on the same rewards, it returned two results", given)

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
            renamed = replace(given, group_ids=given.group_ids * 7 + 3)
            advice = "group_ids are names: number them by torch.unique(group_ids, return_inverse=True)"
            self._check_same(given, renamed, "the numbers of groups matter", advice)

    def test_groups_of_one_reward(self) -> None:
        """A group whose completions are all alike, or that has one alone, gives finite numbers."""
        self._finite(batch([[1.0]], [0]))
        self._finite(batch([[1.0], [1.0]], [0, 0]))
        self._finite(batch([[0.0], [1.0], [3.0]], [0, 0, 1]))
        flat = self._scale(self.build(), batch([[0.7], [0.7]], [0, 0]))
        note = "is not trained on" if not bool((flat != 0).any()) else f"gets advantage {flat[0].item():.3g}"
        self.notes.append(f"a group of equal rewards {note}")

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

    def test_large_and_small_rewards(self) -> None:
        """Rewards of 10,000 and differences of a millionth give finite numbers."""
        for given in (batch([[1e4], [-1e4]], [0, 0]), batch([[0.5], [0.500001]], [0, 0])):
            self._finite(given, "a division by a spread that may be 0: add an epsilon")

    def test_turns(self) -> None:
        """Takes completions of several turns, with tokens that the model did not write between them."""
        scaler = self.build()
        if not takes_inputs(scaler):
            raise SkipTest("its scale(rewards, weights, group_ids) sees no turns")
        per = getattr(scaler, "per", "completion")
        for given in ORDINARY:
            scaled = self._scaled(scaler, given, TWO_TURNS)
            again = self._scaled(scaler, given, TWO_TURNS)
            same = torch.equal(scaled.values, again.values)
            require(same, "called twice on the same turns, it returned two results", given)
        self.notes.append(f"one advantage per {per}")

    def test_what_it_depends_on(self) -> None:
        """Reports if an advantage depends on more than its own group."""
        given = batch([[0.0], [1.0], [2.0], [2.5]], [0, 0, 1, 1])
        other = batch([[0.0], [1.0], [-3.0], [9.0]], [0, 0, 1, 1])
        alone = close(self._scale(self.build(), given)[:2], self._scale(self.build(), other)[:2])
        self.notes.append(f"depends on its own group{'' if alone else ' and on the others of the batch'}")

    def _scale(self, scaler: Any, given: Batch) -> Tensor:
        """f32[N]; the mean over a completion's tokens where they have different advantages."""
        try:
            if takes_inputs(scaler):
                return self._scaled(scaler, given, ONE_TURN).values
            own: Tensor = call("advantage", scaler.scale, given.rewards, given.weights, given.group_ids)
        except RunFailed as error:
            raise Violation(str(error), str(given)) from error
        return own

    def _scaled(self, scaler: Any, given: Batch, rollout: Rollout) -> Advantages:
        """Scale by ``scale(inputs)``, every completion like `rollout`; what a run refuses is a violation."""
        groups, count = given.group_ids.tolist(), len(given.rewards)
        steps = {"steps": STEPS} if rollout.turns else {}
        rows = [
            ScoredRow(replace(rollout, group_id=group, sample=place), (), (), {}, token_rewards=steps)
            for place, group in enumerate(groups)
        ]
        columns = {name: [value] * count for name, value in self.columns.items()}
        numbers = range(10, 11 + max(groups))
        scored = ScoredBatch(
            rows, given.rewards, given.weights, given.group_ids, numbers, lambda: columns, step=1
        )
        try:
            return BatchScaler(scaler).scale(scored)
        except RunFailed as error:
            raise Violation(str(error), f"{given}\nof each completion {rollout}") from error

    def _finite(self, given: Batch, advice: str = "") -> Tensor:
        scaled = self._scale(self.build(), given)
        example = f"{given}\nadvantages {_numbers(scaled.tolist())}"
        require(bool(scaled.isfinite().all()), "its advantages are not all finite", example, advice)
        return scaled

    def _check_same(self, given: Batch, other: Batch, what: str, advice: str, order: Any = ...) -> None:
        """Compare the advantages of two batches, the second of which has the rows `order` of the first."""
        same = close(self._scale(self.build(), other), self._scale(self.build(), given)[order])
        require(same, what, other, advice)


def _numbers(values: list[float]) -> str:
    return "  ".join(f"{value:g}" for value in values)


ONE_TURN = Rollout(0, 0, (1,), (2, 3, 4), "stop", 0)
TWO_TURNS = Rollout(
    *(0, 0, (1,), (2, 3, 4, 5), "done", 0),
    model_mask=(True, True, False, True),
    turns=(Turn(0, 2, "stop", 0, 0.5, "begin"), Turn(3, 4, "stop", 0, -1.0, "middle")),
)
"""The token between the turns is of an environment."""
STEPS = (0.0, 0.25, 0.0, -0.5)
"""Rewards of its tokens."""
