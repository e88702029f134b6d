"""Groups the samples of an optimizer step into micro-batches, and tells which need no backward pass.

A step's samples are sorted by length and grouped anew, so that little is computed for padding. That changes no
gradient, because a token's weight comes from counts over the whole step. A loss that is normalised in each
micro-batch by itself keeps the micro-batches of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpox.config import TrainConfig
from grpox.contracts import Reduction
from grpox.policy.batch import Row, Sample, rows_of
from grpox.policy.forward_modes import FULL_LOGITS, ForwardMode
from grpox.runtime.world import World
from grpox.update.objective import LossTraits


@dataclass(frozen=True, eq=False)
class PackedMicroBatch:
    """Samples of this rank that go through the model together."""

    samples: Sequence[Sample]
    needs_backward: bool
    """True where its loss has a gradient."""


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The micro-batches of this rank, as many of each kind as on every other rank."""

    micro_batches: Sequence[PackedMicroBatch]
    """First come all that need no backward pass."""
    padding_fraction: float
    """The part of the positions computed, on all ranks, that hold no token."""


@dataclass(frozen=True)
class MicroBatchPacker:
    """Groups the samples of each step as the run's settings, its loss and its model allow."""

    train: TrainConfig
    mode: ForwardMode
    keeps_schedule: bool
    """The micro-batches of the schedule stay as they are."""
    skips_backward: bool
    """A sequence without advantage needs no backward pass."""

    @classmethod
    def of(cls, train: TrainConfig, traits: LossTraits, mode: ForwardMode) -> MicroBatchPacker:
        """Decide by the settings, and by the declarations of the loss."""
        local = traits.reduction is Reduction.LOCAL_TOKEN_MEAN
        silent = traits.zero_at_zero_advantage and train.beta == 0 and train.entropy_coef == 0
        skips = train.skip_zero_advantage and silent and not local
        nothing = not skips and not mode.shared_width and train.max_tokens_per_micro_batch is None
        return cls(train, mode, keeps_schedule=local or nothing, skips_backward=skips)

    def pack(
        self, micro_batches: Sequence[Sequence[Sample]], world: World, backward: bool = True
    ) -> PackedStep:
        """Group this rank's samples of a step; a collective.

        Args:
            backward: whether to update; else no micro-batch needs a backward pass.
        """
        if self.keeps_schedule:
            return self._as_scheduled(micro_batches, world, backward)
        samples = [sample for micro_batch in micro_batches for sample in micro_batch]
        kinds: tuple[list[Sample], list[Sample]] = ([], [])  # without a backward pass, and with one
        for sample in samples:
            live = not self.skips_backward or (sample.advantage != 0 and bool(sample.token_mask.any()))
            kinds[backward and live].append(sample)
        cuts = [self._cut(kind, len(samples)) for kind in kinds]
        real = sum(row.length for cut in cuts for rows in cut for row in rows)
        computed = sum(self._positions(rows) for cut in cuts for rows in cut)
        sizes = world.gather([(len(cuts[0]), len(cuts[1]), real, computed)])
        counts = [max(size[kind] for size in sizes) for kind in (0, 1)]
        if backward and counts[1] == 0:  # the optimizer steps all the same
            counts[1] = 1
        packed = []
        for kind, (of_kind, cut) in enumerate(zip(kinds, cuts, strict=True)):
            for rows in cut:
                together = [of_kind[member] for row in rows for member in row.members]
                packed.append(PackedMicroBatch(together, needs_backward=kind == 1))
            if missing := counts[kind] - len(cut):
                packed += [PackedMicroBatch([_filler(samples)], kind == 1)] * missing
        return PackedStep(packed, _padding(sizes))

    def _as_scheduled(
        self, micro_batches: Sequence[Sequence[Sample]], world: World, backward: bool
    ) -> PackedStep:
        real, computed = 0, 0
        for samples in micro_batches:
            if self.mode == FULL_LOGITS:
                real += sum(map(len, samples))
                widest = max(len(s.prompt) for s in samples), max(1, *(len(s.completion) for s in samples))
                computed += len(samples) * sum(widest)
            else:
                rows = rows_of(samples, self.mode.shared_width)
                real, computed = real + sum(row.length for row in rows), computed + self._positions(rows)
        packed = [PackedMicroBatch(samples, backward) for samples in micro_batches]
        return PackedStep(packed, _padding(world.gather([(0, 0, real, computed)])))

    def _cut(self, samples: Sequence[Sample], step_size: int) -> list[list[Row]]:
        """Group `samples` into rows that go together, longest first; `step_size` samples make up the step."""
        budget = self.train.max_tokens_per_micro_batch
        most = self.train.per_device_train_batch_size if budget is None else step_size
        cut: list[list[Row]] = []
        for row in rows_of(samples, self.mode.shared_width, most, budget):
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
        """Count the positions that the model computes for rows that go together, longest first."""
        return sum(row.length for row in rows) if self.mode.packed else len(rows) * rows[0].length


def _filler(samples: Sequence[Sample]) -> Sample:
    """Return a sample in which no token counts, for a forward that only the other ranks need."""
    shortest = min(samples, key=len)
    return replace(shortest, token_mask=np.zeros_like(shortest.token_mask))


def _padding(sizes: Sequence[tuple[int, int, int, int]]) -> float:
    real, computed = sum(size[2] for size in sizes), sum(size[3] for size in sizes)
    return 1 - real / computed
