"""Which sequences of an optimizer step go through the model together, and which need no backward pass.

A step's sequences are sorted by length and cut anew, so that little is computed for padding. That changes no
gradient, because a token's weight comes from counts over the whole step. A loss that is normalised in each
micro-batch by itself keeps the micro-batches of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpox.config import TrainConfig
from grpox.contracts import PolicyLoss, Reduction
from grpox.policy.batch import TokenSequence
from grpox.policy.forward_modes import PLAIN, ForwardWays
from grpox.policy.row_layout import Row, rows_of
from grpox.runtime.world import World
from grpox.update.micro_batch import Slice, merged, rows_of_slice


@dataclass(frozen=True, eq=False)
class Pass:
    """Sequences of this rank that go through the model together."""

    slice: Slice
    numbers: Sequence[int]
    """Of its rows among all rows of the step on this rank; fewer than it has rows where those only keep this
    rank in step with the others."""
    teaches: bool
    """Whether its loss has a gradient."""


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes of this rank, as many of each kind as on every other rank; those that teach come last."""

    slices: Sequence[Slice]
    """The micro-batches of the schedule that the passes are made of."""
    passes: Sequence[Pass]
    padding_fraction: float
    """The part of the positions computed, on all ranks, that hold no token."""

    def spread(self, values: Sequence[Tensor | None]) -> list[Tensor]:
        """What the passes computed, [b, t] each, for each slice: [B, T], 0 where there is nothing."""
        shapes = [s.batch.token_mask.shape for s in self.slices]
        like = next(v for v in values if v is not None)
        whole = like.new_zeros(sum(rows for rows, _ in shapes), max(columns for _, columns in shapes))
        for passed, value in zip(self.passes, values, strict=True):
            if value is not None and passed.numbers:
                count, columns = len(passed.numbers), value.shape[1]
                whole[list(passed.numbers), :columns] = value[:count]
        parts = torch.split(whole, [rows for rows, _ in shapes])
        return [part[:, :columns].clone() for part, (_, columns) in zip(parts, shapes, strict=True)]

    def keep(self, names: Sequence[str] = ("old_logprobs", "reference_logprobs")) -> None:
        """Give the slices the log-probabilities that were fixed in the passes over them."""
        for name in names:
            values = [getattr(passed.slice, name) for passed in self.passes]
            if any(value is not None for value in values):
                for slice_, value in zip(self.slices, self.spread(values), strict=True):
                    setattr(slice_, name, value)


@dataclass(frozen=True)
class Arrangement:
    """How a run cuts its steps into passes."""

    train: TrainConfig
    ways: ForwardWays
    fixed: bool
    """Whether the micro-batches of the schedule are kept."""
    skips: bool
    """Whether a sequence without advantage needs no backward pass."""

    @classmethod
    def of(cls, train: TrainConfig, policy_loss: PolicyLoss, ways: ForwardWays) -> Arrangement:
        """That of a run: its settings, and what its loss declares."""
        local = policy_loss.reduction is Reduction.LOCAL_TOKEN_MEAN
        silent = getattr(policy_loss, "zero_at_zero_advantage", False)
        silent = silent and train.beta == 0 and train.entropy_coef == 0
        skips = train.skip_zero_advantage and silent and not local
        nothing = not skips and not ways.shared_width and train.max_tokens_per_micro_batch is None
        return cls(train, ways, fixed=local or nothing, skips=skips)

    def passes(self, slices: Sequence[Slice], world: World, teach: bool = True) -> Passes:
        """Cut this rank's slices of a step into passes; a collective.

        Args:
            teach: whether to update; else every pass is without a gradient.
        """
        if self.fixed:
            return self._as_scheduled(slices, world, teach)
        whole = merged(slices)
        sequences = whole.batch.sequences
        teaching, idle = self._kinds(whole, teach)
        cuts = [self._cut(sequences, idle), self._cut(sequences, teaching)]
        real = sum(row.length for cut in cuts for rows in cut for row in rows)
        computed = sum(self._positions(rows) for cut in cuts for rows in cut)
        told = world.gather([(len(cuts[0]), len(cuts[1]), real, computed)])
        counts = [max(each[kind] for each in told) for kind in (0, 1)]
        if teach and counts[1] == 0:  # the optimizer steps all the same
            counts[1] = 1
        shortest = min(range(len(sequences)), key=lambda number: len(sequences[number]))
        made = []
        for teaches, cut, count in zip((False, True), cuts, counts, strict=True):
            for rows in cut:
                numbers = [number for row in rows for number in row.members]
                made.append(Pass(rows_of_slice(whole, numbers), numbers, teaches))
            if missing := count - len(cut):
                made += [Pass(_blank(whole, shortest), (), teaches)] * missing
        return Passes(slices, made, _padding(told))

    def _as_scheduled(self, slices: Sequence[Slice], world: World, teach: bool) -> Passes:
        made, first, real, computed = [], 0, 0, 0
        for slice_ in slices:
            count = len(slice_.batch.token_mask)
            made.append(Pass(replace(slice_), range(first, first + count), teach))
            first += count
            if self.ways == PLAIN:
                mask = slice_.batch.attention_mask
                real, computed = real + int(mask.sum()), computed + mask.numel()
            else:
                rows = rows_of(slice_.batch.sequences, self.ways.shared_width)
                real, computed = real + sum(r.length for r in rows), computed + self._positions(rows)
        return Passes(slices, made, _padding(world.gather([(0, 0, real, computed)])))

    def _kinds(self, whole: Slice, teach: bool) -> tuple[list[int], list[int]]:
        """Numbers of the rows with a gradient, and of those without."""
        count = len(whole.batch.advantages)
        if not teach:
            return [], list(range(count))
        if not self.skips:
            return list(range(count)), []
        live = ((whole.batch.advantages != 0) & whole.batch.token_mask.any(dim=1)).tolist()
        return [n for n in range(count) if live[n]], [n for n in range(count) if not live[n]]

    def _cut(self, sequences: Sequence[TokenSequence], numbers: Sequence[int]) -> list[list[Row]]:
        """Rows that go together, longest first."""
        budget = self.train.max_tokens_per_micro_batch
        most = self.train.per_device_train_batch_size if budget is None else len(sequences)
        rows = rows_of([sequences[number] for number in numbers], self.ways.shared_width, most, budget)
        cut: list[list[Row]] = []
        for row in rows:
            row = replace(row, members=tuple(numbers[member] for member in row.members))
            if cut and self._fits([*cut[-1], row], most):
                cut[-1].append(row)
            else:
                cut.append([row])
        return cut

    def _fits(self, rows: Sequence[Row], most: int) -> bool:
        budget = self.train.max_tokens_per_micro_batch
        return sum(len(row.members) for row in rows) <= most and (
            budget is None or self._positions(rows) <= budget
        )

    def _positions(self, rows: Sequence[Row]) -> int:
        """How many the model computes for rows that go together, longest first."""
        return sum(row.length for row in rows) if self.ways.packed else len(rows) * rows[0].length


def _blank(whole: Slice, number: int) -> Slice:
    """A row in which nothing counts, for a forward that only the other ranks need."""
    made = rows_of_slice(whole, [number])
    mask = torch.zeros_like(made.batch.token_mask)
    return replace(made, batch=replace(made.batch, token_mask=mask))


def _padding(told: Sequence[tuple[int, int, int, int]]) -> float:
    real, computed = sum(each[2] for each in told), sum(each[3] for each in told)
    return 1 - real / computed
