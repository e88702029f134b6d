"""Groups the samples of an optimizer step into micro-batches, and tells which need no backward pass.

A step's samples are sorted by length and grouped anew, so that little is computed for padding. That changes no
gradient, because a token's weight comes from counts over the whole step. A loss that is normalised in each
micro-batch by itself keeps the micro-batches of the schedule. The counts, one weight per token, are taken over
all micro-batches and ranks: the gradient is a plain sum over tokens, the same for every split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.config import TrainConfig
from grpox.config.training import tokens_on
from grpox.contracts import PolicyLoss, Reduction
from grpox.errors import RunFailed
from grpox.policy.batch import FULL_LOGITS, ForwardMode, Row, Sample, rows_of
from grpox.runtime.world import World


@dataclass(frozen=True)
class LossTraits:
    """The declarations of a policy loss, read once where a run binds it."""

    reduction: Reduction
    folds_correction: bool = False
    """The loss applies the correction R itself."""
    zero_at_zero_advantage: bool = False
    """A sequence whose advantages are all 0 adds nothing to the gradient."""
    whole_groups: bool = False
    """All sequences of a prompt have to lie in one micro-batch."""

    @property
    def divides(self) -> bool:
        """A step's sequences may be divided into micro-batches in any way."""
        return self.reduction is not Reduction.LOCAL_TOKEN_MEAN and not self.whole_groups

    @classmethod
    def of(cls, loss: PolicyLoss) -> LossTraits:
        """Read them from `loss`, where what it leaves out is False."""
        return cls(
            loss.reduction,
            getattr(loss, "folds_correction", False),
            getattr(loss, "zero_at_zero_advantage", False),
            getattr(loss, "scope", "token") == "group",
        )


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
    whole_groups: bool = False
    """The sequences of a prompt stay together, and need a backward pass if one of them does."""
    budget: int | None = None
    """Positions of a micro-batch; None: it has `train.per_device_train_batch_size` sequences."""

    @classmethod
    def of(cls, train: TrainConfig, traits: LossTraits, mode: ForwardMode) -> MicroBatchPacker:
        """Decide by the settings, and by the declarations of the loss."""
        local = traits.reduction is Reduction.LOCAL_TOKEN_MEAN
        has_terms = train.beta > 0 or train.has_entropy_bonus or train.router_aux_loss_coef > 0
        silent = traits.zero_at_zero_advantage and not has_terms
        skips = train.skip_zero_advantage and silent and not local
        budget = tokens_on(train.max_tokens_per_micro_batch, torch.cuda.is_available(), traits.divides)
        nothing = not skips and not mode.shared_width and budget is None
        return cls(train, mode, local or nothing, skips, traits.whole_groups, budget)

    def pack(
        self, micro_batches: Sequence[Sequence[Sample]], world: World, backward: bool = True
    ) -> PackedStep:
        """Group this rank's samples of a step; a collective.

        Args:
            backward: whether to update; else no micro-batch needs a backward pass.

        Raises:
            RunFailed: a group that has to stay together is larger than a micro-batch may be.
        """
        if self.keeps_schedule:
            return self._as_scheduled(micro_batches, world, backward)
        samples = [sample for micro_batch in micro_batches for sample in micro_batch]
        kinds: tuple[list[Sample], list[Sample]] = ([], [])  # without a backward pass, and with one
        for sample, live in zip(samples, self._live(samples), strict=True):
            kinds[backward and live].append(sample)
        cuts = [self._cut(kind, len(samples)) for kind in kinds]
        real = sum(row.length for cut in cuts for rows in cut for row in rows)
        positions = [self._positions(rows) for cut in cuts for rows in cut]
        if self.whole_groups and self.budget is not None:
            # The largest micro-batch may be a single group, which cannot be cut.
            largest = max(world.gather([max(positions)]))
            if largest > self.budget:
                raise RunFailed(
                    f"train.max_tokens_per_micro_batch is {self.budget}, and a group of "
                    f"{self.train.num_generations} completions takes {largest} tokens with its padding; the "
                    f"loss has scope 'group' and is given whole groups: set it to {largest} or more, or to null"
                )
        sizes = world.gather([(len(cuts[0]), len(cuts[1]), real, sum(positions))])
        counts = [max(size[kind] for size in sizes) for kind in (0, 1)]
        if backward and counts[1] == 0:  # the optimizer steps all the same
            counts[1] = 1
        packed = []
        for kind, (of_kind, cut) in enumerate(zip(kinds, cuts, strict=True)):
            for rows in cut:
                members = [member for row in rows for member in row.members]
                together = [of_kind[member] for member in (sorted(members) if self.whole_groups else members)]
                packed.append(PackedMicroBatch(together, needs_backward=kind == 1))
            if missing := counts[kind] - len(cut):
                packed += [PackedMicroBatch(self._filler(samples), kind == 1)] * missing
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

    def _live(self, samples: Sequence[Sample]) -> list[bool]:
        """Tell for each sample of a step whether it can have a gradient."""
        if not self.skips_backward:
            return [True] * len(samples)
        own = [sample.has_advantage for sample in samples]
        if not self.whole_groups:
            return own
        groups = {sample.group_id for sample, live in zip(samples, own, strict=True) if live}
        return [sample.group_id in groups for sample in samples]

    def _cut(self, samples: Sequence[Sample], step_size: int) -> list[list[Row]]:
        """Group `samples` into rows that go together, longest first; `step_size` samples make up the step."""
        most = self.train.per_device_train_batch_size if self.budget is None else step_size
        width = self.mode.shared_width
        if self.whole_groups:  # which cannot be parted
            units = []
            for numbers in _groups_of(samples):
                rows = rows_of([samples[number] for number in numbers], width, most, self.budget)
                units.append([replace(row, members=tuple(numbers[m] for m in row.members)) for row in rows])
            units.sort(key=lambda rows: -rows[0].length)
        else:
            units = [[row] for row in rows_of(samples, width, most, self.budget)]
        cut: list[list[Row]] = []
        for rows in units:
            if cut and self._fits([*cut[-1], *rows], most):
                cut[-1] += rows
            else:
                cut.append(rows)
        return cut

    def _fits(self, rows: Sequence[Row], most: int) -> bool:
        return sum(len(row.members) for row in rows) <= most and (
            self.budget is None or self._positions(rows) <= self.budget
        )

    def _positions(self, rows: Sequence[Row]) -> int:
        """Count the positions that the model computes for rows that go together."""
        lengths = [row.length for row in rows]
        return sum(lengths) if self.mode.packed else len(lengths) * max(lengths)

    def _filler(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return samples in which no token counts, for a forward that only the other ranks need."""
        if not self.whole_groups:
            return [_silent(min(samples, key=len))]
        groups = [[samples[number] for number in numbers] for numbers in _groups_of(samples)]
        return [_silent(sample) for sample in min(groups, key=lambda group: max(map(len, group)))]


def _groups_of(samples: Sequence[Sample]) -> list[list[int]]:
    """List the numbers of the samples of each group, in their order."""
    groups: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        if sample.group_id is None:
            raise ValueError("a loss of scope 'group' trains on samples with a group_id, and one has none")
        groups.setdefault(sample.group_id, []).append(number)
    return list(groups.values())


def _silent(sample: Sample) -> Sample:
    """Copy a sample without a token that counts; its numbers become negative, which no real sample has."""
    group, sequence = (None if n is None else -1 - n for n in (sample.group_id, sample.sequence_id))
    mask = np.zeros_like(sample.token_mask)
    return replace(sample, token_mask=mask, group_id=group, sequence_id=sequence, token_record=None)


def _padding(sizes: Sequence[tuple[int, int, int, int]]) -> float:
    real, computed = sum(size[2] for size in sizes), sum(size[3] for size in sizes)
    return 1 - real / computed


@dataclass(frozen=True)
class StepTotals:
    """Counts over one optimizer step, all ranks, taken before anything is dropped from the loss."""

    tokens: int
    sequences: int
    micro_batches: int
    max_completion_length: int


def count_masks(micro_batches: Iterable[Tensor | Sequence[np.ndarray]]) -> tuple[int, int, int]:
    """Tokens, sequences and micro-batches of token masks: bool[B, T] each, or a list of B bool[T]."""
    masks = list(micro_batches)
    return sum(int(row.sum()) for mask in masks for row in mask), sum(map(len, masks)), len(masks)


def count_step(
    micro_batches: Iterable[Tensor | Sequence[np.ndarray]], world: World, max_completion_length: int
) -> StepTotals:
    """Count a step from this rank's token masks, as `count_masks` takes them: one all-reduce."""
    # On the host, which knows them: a GPU would have to finish what it does first.
    counts = torch.tensor(count_masks(micro_batches), dtype=torch.float64)
    tokens, sequences, number = (int(n) for n in world.reduce(counts, dist.ReduceOp.SUM).tolist())
    return StepTotals(tokens, sequences, number, max_completion_length)


def token_weights(
    reduction: Reduction, mask: Tensor, totals: StepTotals, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight of every token in the loss of the step: bool[B, T] -> f32[B, T], 0 where masked.

    Args:
        reduction: how the loss declares that its tokens add up.
        mask: bool[B, T], one micro-batch on one rank.
        totals: counts over the whole step.
        dtype: of the weights, that of the log-probabilities.
    """
    m = mask.to(dtype)
    sequences = max(totals.sequences, 1)
    match reduction:
        case Reduction.TOKEN_MEAN:
            return m / max(totals.tokens, 1)
        case Reduction.SEQUENCE_MEAN:
            tokens = m.sum(dim=1, keepdim=True).clamp(min=1)  # f32[B, 1]
            return m / (tokens * sequences)
        case Reduction.SEQUENCE_SUM:
            return m / sequences
        case Reduction.SEQUENCE_SUM_BY_MAX_LENGTH:
            return m / (sequences * totals.max_completion_length)
        case Reduction.LOCAL_TOKEN_MEAN:
            return m / (m.sum().clamp(min=1) * max(totals.micro_batches, 1))
