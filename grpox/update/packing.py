"""Groups the samples of an optimizer step into micro-batches, some of which need no backward pass.

A step's samples are sorted by length and grouped anew, so that little is computed for padding. This changes no
gradient: a token's weight comes from counts over all micro-batches and ranks of the step, so the gradient is a
plain sum over tokens, the same for every split. A loss that is normalised in each micro-batch by itself keeps
the micro-batches of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.config import TrainConfig
from grpox.config.training import tokens_on
from grpox.contracts import PolicyLoss, Reduction
from grpox.errors import RunFailed
from grpox.policy.batch import ForwardMode, Sample, Tokens, lengths_of, rows_of
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
        """Read the declarations of `loss`; missing ones are False."""
        return cls(
            loss.reduction,
            getattr(loss, "folds_correction", False),
            getattr(loss, "zero_at_zero_advantage", False),
            getattr(loss, "scope", "token") == "group",
        )


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
        """Build the packer for these settings and declarations of the loss."""
        local = traits.reduction is Reduction.LOCAL_TOKEN_MEAN
        has_terms = train.beta > 0 or train.has_entropy_bonus or train.router_aux_loss_coef > 0
        silent = traits.zero_at_zero_advantage and not has_terms
        skips = train.skip_zero_advantage and silent and not local
        budget = tokens_on(train.max_tokens_per_micro_batch, torch.cuda.is_available(), traits.divides)
        nothing = not skips and not mode.shared_width and budget is None
        return cls(train, mode, local or nothing, skips, traits.whole_groups, budget)

    def pack(
        self, micro_batches: Sequence[Sequence[Sample]], world: World, backward: bool = True
    ) -> tuple[list[tuple[Sequence[Sample], bool]], float]:
        """Group this rank's samples of a step; a collective.

        Args:
            backward: False: no micro-batch needs a backward pass, because there is no update.

        Returns:
            the samples of each micro-batch, with True if it needs a backward pass, those without one first, and
            as many of each kind as on every other rank; and the share of the computed positions, over all
            ranks, that hold no token.

        Raises:
            RunFailed: a group that has to stay together is larger than a micro-batch may be.
        """
        if self.keeps_schedule:
            sizes = np.array(world.gather([(0, 0, *self._count_positions(micro_batches))]))
            return [(samples, backward) for samples in micro_batches], _padding(sizes)
        samples = list(chain.from_iterable(micro_batches))
        prompts, lengths = _measure(samples)
        is_live = self._find_live(samples) & backward
        idle, live = np.flatnonzero(~is_live).tolist(), np.flatnonzero(is_live).tolist()
        cuts = self._cut(samples, prompts, lengths, idle), self._cut(samples, prompts, lengths, live)
        tokens, rows, longest = np.array([size for cut in cuts for _, *size in cut]).T
        positions = tokens if self.mode.packed else rows * longest
        if self.whole_groups and self.budget is not None:
            # The largest micro-batch may be a single group, which cannot be cut.
            largest = max(world.gather([int(positions.max())]))
            if largest > self.budget:
                raise RunFailed(
                    f"train.max_tokens_per_micro_batch is {self.budget}, and a group of "
                    f"{self.train.num_generations} completions takes {largest} tokens with its padding; the "
                    f"loss has scope 'group' and is given whole groups: set it to {largest} or more, or to null"
                )
        sizes = np.array(world.gather([(*map(len, cuts), int(tokens.sum()), int(positions.sum()))]))
        counts = sizes[:, :2].max(axis=0).tolist()
        counts[1] = max(counts[1], int(backward))  # the optimizer steps even if nothing is live
        packed: list[tuple[Sequence[Sample], bool]] = []
        for kind, cut in enumerate(cuts):
            for numbers, *_ in cut:
                numbers = sorted(numbers) if self.whole_groups else numbers
                packed.append(([samples[number] for number in numbers], kind == 1))
            if missing := counts[kind] - len(cut):
                packed += [(self._make_filler(samples, lengths), kind == 1)] * missing
        return packed, _padding(sizes)

    def _count_positions(self, micro_batches: Sequence[Sequence[Sample]]) -> tuple[int, int]:
        """Count the tokens of the schedule's micro-batches, and the positions that the model computes."""
        tokens, positions = 0, 0
        for samples in micro_batches:
            prompts, lengths = _measure(samples)
            if self.mode.chunked:
                rows, _ = rows_of(prompts, lengths, range(len(samples)), self.mode.shared_width)
                own, computed = sum(rows), sum(rows) if self.mode.packed else len(rows) * rows[0]
            else:
                prompt, completion = lengths.max(axis=1).tolist()
                own, computed = int(lengths.sum()), len(samples) * (prompt + max(1, completion))
            tokens, positions = tokens + own, positions + computed
        return tokens, positions

    def _find_live(self, samples: Sequence[Sample]) -> np.ndarray:
        """Find the samples of a step that can have a gradient: bool[B]."""
        if not self.skips_backward:
            return np.ones(len(samples), dtype=np.bool_)
        live = [bool((sample.token_mask & (sample.advantage != 0)).any()) for sample in samples]
        if self.whole_groups:
            groups = {sample.group_id for sample, own in zip(samples, live, strict=True) if own}
            live = [sample.group_id in groups for sample in samples]
        return np.array(live)

    def _cut(
        self, samples: Sequence[Sample], prompts: Sequence[Tokens], lengths: np.ndarray, numbers: Sequence[int]
    ) -> list[tuple[list[int], int, int, int]]:
        """Group the samples of a step that have these numbers, the longest first.

        Returns:
            for each micro-batch its samples' numbers, its tokens, its number of rows, its longest row.
        """
        most = self.train.per_device_train_batch_size if self.budget is None else len(samples)
        limits = self.mode.shared_width, most, self.budget
        units = []  # samples that stay together, as in the result
        if self.whole_groups:
            for group in _groups_of(samples, numbers):
                rows, _ = rows_of(prompts, lengths, group, *limits)
                units.append((group, sum(rows), len(rows), rows[0]))
            units.sort(key=itemgetter(3), reverse=True)
        else:
            rows, members_of = rows_of(prompts, lengths, numbers, *limits)
            units = [(members, length, 1, length) for members, length in zip(members_of, rows, strict=True)]
        cut = units[:1]
        for unit in units[1:]:
            (members, tokens, count, longest), (further, own, more, _) = cut[-1], unit
            joined = members + further, tokens + own, count + more, longest
            positions = joined[1] if self.mode.packed else joined[2] * longest
            if len(joined[0]) <= most and (self.budget is None or positions <= self.budget):
                cut[-1] = joined
            else:
                cut.append(unit)
        return cut

    def _make_filler(self, samples: Sequence[Sample], lengths: np.ndarray) -> list[Sample]:
        """Copy samples without a token that counts, for a forward that only the other ranks need.

        Their numbers become negative, which no real sample has.
        """
        total = lengths.sum(axis=0)
        shortest = [int(total.argmin())]
        if self.whole_groups:
            groups = _groups_of(samples, range(len(samples)))
            shortest = min(groups, key=lambda group: int(total[group].max()))
        fillers = []
        for sample in (samples[number] for number in shortest):
            group, sequence = (None if n is None else -1 - n for n in (sample.group_id, sample.sequence_id))
            mask = np.zeros_like(sample.token_mask)
            fillers.append(
                replace(sample, token_mask=mask, group_id=group, sequence_id=sequence, token_record=None)
            )
        return fillers


def _measure(samples: Sequence[Sample]) -> tuple[list[Tokens], np.ndarray]:
    """List the prompts, and count the tokens of prompts and completions: i64[2, B]."""
    prompts = [sample.prompt for sample in samples]
    return prompts, lengths_of(prompts, [sample.completion for sample in samples])


def _groups_of(samples: Sequence[Sample], numbers: Iterable[int]) -> list[list[int]]:
    """List the numbers of the samples of each group, in their order."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        group = samples[number].group_id
        if group is None:
            raise ValueError("a loss of scope 'group' trains on samples with a group_id, and one has none")
        groups.setdefault(group, []).append(number)
    return list(groups.values())


def _padding(sizes: np.ndarray) -> float:
    """Compute the share of positions without a token, from sizes i64[ranks, 4] as `pack` gathers them."""
    _, _, tokens, positions = sizes.sum(axis=0).tolist()
    return float(1 - tokens / positions)


@dataclass(frozen=True)
class StepTotals:
    """Counts over one optimizer step, all ranks, taken before anything is dropped from the loss."""

    tokens: int
    sequences: int
    micro_batches: int
    max_completion_length: int


def count_masks(micro_batches: Iterable[Tensor | Sequence[np.ndarray]]) -> tuple[int, int, int]:
    """Count tokens, sequences and micro-batches of token masks: bool[B, T] each, or a list of B bool[T]."""
    masks = list(micro_batches)
    tokens = [int(mask.sum() if isinstance(mask, Tensor) else np.concatenate(mask).sum()) for mask in masks]
    return sum(tokens), sum(map(len, masks)), len(masks)


def count_step(
    micro_batches: Iterable[Tensor | Sequence[np.ndarray]], world: World, max_completion_length: int
) -> StepTotals:
    """Count a step from this rank's token masks, as `count_masks` takes them: one all-reduce."""
    # On the host, which knows them: reading from a GPU would wait for all its work.
    counts = torch.tensor(count_masks(micro_batches), dtype=torch.float64)
    tokens, sequences, number = map(int, world.reduce(counts, dist.ReduceOp.SUM).tolist())
    return StepTotals(tokens, sequences, number, max_completion_length)


def token_weights(
    reduction: Reduction, mask: Tensor, totals: StepTotals, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute the weight of every token in the step's loss: bool[B, T] -> f32[B, T], 0 where masked.

    Args:
        reduction: reduction that the loss declares.
        mask: bool[B, T], one micro-batch on one rank.
        totals: counts over the whole step.
        dtype: dtype of the weights, as of the log-probabilities.
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
