"""The schedule: which rows of which generation batch make up each optimizer step.

Everything here is a pure function of the config and an index, so resuming needs no saved sampler state.
``generation_batch_size = per_device_train_batch_size * world_size * steps_per_generation``, and
``optimizer steps per generation = steps_per_generation * num_iterations / gradient_accumulation_steps``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    from grpox.config import TrainConfig
    from grpox.data.prompts import PromptSet
    from grpox.data.row_stream import RowStream


@dataclass(frozen=True)
class BatchPlan:
    """Numbers of rows, micro-batches and steps that a run works with; the names are TRL's."""

    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int = 1

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of one micro-batch over all ranks."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def generation_batch_size(self) -> int:
        """Completions of one generation batch, over all ranks."""
        return self.rows_per_micro_batch * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """Unique prompts of one generation batch."""
        return self.generation_batch_size // self.num_generations

    @property
    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.rows_per_micro_batch * self.gradient_accumulation_steps

    @property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches drawn from one generation batch, all its iterations counted."""
        return self.steps_per_generation * self.num_iterations

    @property
    def optimizer_steps_per_generation(self) -> Fraction:
        """Below 1 when an optimizer step spans several generation batches."""
        return Fraction(self.micro_batches_per_generation, self.gradient_accumulation_steps)

    @classmethod
    def from_config(cls, train: TrainConfig, world_size: int) -> BatchPlan:
        """The plan of `train` on `world_size` ranks.

        Raises:
            ConfigError: the sizes do not divide as they must; the message names the nearest that do.
        """
        plan = cls(
            world_size,
            train.per_device_train_batch_size,
            train.gradient_accumulation_steps,
            _steps_per_generation(train, world_size),
            train.num_generations,
            train.num_iterations,
        )
        problems = [problem for problem in (_uneven_steps(plan), _uneven_groups(plan)) if problem]
        if problems:
            raise ConfigError(problems)
        return plan


@dataclass(frozen=True)
class MicroBatchPlan:
    """One forward and backward pass on every rank."""

    generation: int
    """Which generation batch of the run, from 0."""
    iteration: int
    """Which pass over that generation batch, from 0."""
    rows: range
    """Rows of that generation batch, all ranks together; row r belongs to its prompt number r // G."""
    rows_per_rank: int

    def rank_rows(self, rank: int) -> range:
        """The rows that `rank` trains on."""
        start = self.rows.start + rank * self.rows_per_rank
        return range(start, start + self.rows_per_rank)


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step."""

    step: int
    """Counted from 1."""
    micro_batches: tuple[MicroBatchPlan, ...]


class PromptSampler:
    """Draws the prompts of each generation batch: shuffled once per epoch, then cut into chunks."""

    def __init__(self, num_prompts: int, prompts_per_generation: int, shuffle: bool, seed: int) -> None:
        """
        Raises:
            ConfigError: there are fewer prompts than one generation batch takes.
        """
        if num_prompts < prompts_per_generation:
            raise _too_few(num_prompts, prompts_per_generation)
        self.num_prompts = num_prompts
        self.prompts_per_generation = prompts_per_generation
        self.generations_per_epoch = num_prompts // prompts_per_generation
        """Whole chunks; what is left at the end of an epoch is dropped."""
        self._shuffle = shuffle
        self._seed = seed
        self._cached: tuple[int, list[int]] = (-1, [])

    def prompts_for(self, generation: int) -> list[int]:
        """Dataset indices of the unique prompts of generation batch `generation` (from 0)."""
        epoch, chunk = divmod(generation, self.generations_per_epoch)
        first = epoch * self.num_prompts + chunk * self.prompts_per_generation
        return self.prompts_at(range(first, first + self.prompts_per_generation))

    def prompts_at(self, positions: range, keep_from: int | None = None) -> list[int]:
        """Dataset indices of the prompts at these positions of the order, epoch after epoch.

        Args:
            held_from: of no use here; a stream keeps its rows from there on.
        """
        return [self._of_epoch(epoch)[place] for epoch, place in map(self._place, positions)]

    def batch_at(self, position: int) -> int:
        """Return where the next generation batch begins; the rest of an epoch may be too short for it."""
        _, place = self._place(position)
        left = self.num_prompts - place
        return position if left >= self.prompts_per_generation else position + left

    @property
    def prompts_per_epoch(self) -> float:
        return self.num_prompts

    def _place(self, position: int) -> tuple[int, int]:
        """Epoch, and place in its order."""
        return divmod(position, self.num_prompts)

    def _of_epoch(self, epoch: int) -> list[int]:
        if self._cached[0] != epoch:
            self._cached = (epoch, self._order(epoch))
        return self._cached[1]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        if self._shuffle:
            random.Random(self._seed + epoch).shuffle(order)
        return order


class StreamSampler:
    """Draws the prompts of each generation batch from a stream: the next ones, across the ends of epochs."""

    def __init__(self, stream: RowStream, prompts: PromptSet, prompts_per_generation: int) -> None:
        """
        Args:
            prompts: those of `stream`; checked as they come.

        Raises:
            ConfigError: an epoch has fewer prompts than one generation batch takes.
            RunFailed: the first generation batch cannot be read, or holds what is no prompt.
        """
        self.prompts_per_generation = prompts_per_generation
        self._stream = stream
        self._prompts = prompts
        self.prompts_for(0)

    @property
    def generations_per_epoch(self) -> float:
        """Generation batches of an epoch, the last one perhaps in part; infinite until an epoch has ended."""
        return self.prompts_per_epoch / self.prompts_per_generation

    @property
    def prompts_per_epoch(self) -> float:
        """Infinite until an epoch has ended."""
        rows = self._stream.rows_per_epoch
        return math.inf if rows is None else rows

    def prompts_for(self, generation: int) -> list[int]:
        """Positions in the stream of the prompts of generation batch `generation`; earlier ones are forgotten.

        Raises:
            RunFailed: the stream cannot be read, or holds what is no prompt.
        """
        first = generation * self.prompts_per_generation
        return self.prompts_at(range(first, first + self.prompts_per_generation))

    def batch_at(self, position: int) -> int:
        """Return where the next generation batch begins."""
        return position

    def prompts_at(self, positions: range, keep_from: int | None = None) -> list[int]:
        """These positions, once their prompts are read; earlier ones are forgotten.

        Args:
            held_from: position of the first prompt that is not forgotten; default: the first of `positions`.

        Raises:
            RunFailed: as `prompts_for`.
        """
        self._stream.hold(range(positions.start if keep_from is None else keep_from, positions.stop))
        rows = self._stream.rows_per_epoch
        if rows is not None and rows < self.prompts_per_generation:
            raise _too_few(rows, self.prompts_per_generation)
        self._prompts.check(positions)
        return list(positions)


def _too_few(num_prompts: int, prompts_per_generation: int) -> ConfigError:
    what = f"one generation batch needs {prompts_per_generation} prompts, the data has {num_prompts}"
    allowed = "more prompts, more num_generations, or a smaller generation batch"
    return ConfigError(what, key="data", allowed=allowed)


class Schedule:
    """The optimizer steps of a run.

    Each generation batch gives its slices 0 .. steps_per_generation - 1 in order, once per iteration; every
    `gradient_accumulation_steps` micro-batches of that stream are one optimizer step.
    """

    def __init__(
        self,
        plan: BatchPlan,
        sampler: PromptSampler | StreamSampler,
        max_steps: int = -1,
        epochs: float = 1.0,
    ) -> None:
        """
        Args:
            max_steps: optimizer steps; below 0, as many as whole generation batches of `epochs` epochs give,
                and at least one. A stream needs them.
        """
        self.plan = plan
        self.sampler = sampler
        self.total_steps = max_steps if max_steps >= 0 else self._steps_of(epochs)

    def _steps_of(self, epochs: float) -> int:
        # As the decimal number the user wrote: 0.29 * 100 generations are 29, though not in floating point.
        generations = int(Fraction(str(epochs)) * self.sampler.generations_per_epoch)
        return max(1, int(generations * self.plan.optimizer_steps_per_generation))

    def steps(self, start: int = 0) -> Iterator[StepPlan]:
        """The steps that are left when `start` of them are done."""
        accumulation = self.plan.gradient_accumulation_steps
        for done in range(start, self.total_steps):
            first = done * accumulation
            micro_batches = tuple(self._micro_batch(index) for index in range(first, first + accumulation))
            yield StepPlan(done + 1, micro_batches)

    def slices_of(self, generation: int) -> Iterator[MicroBatchPlan]:
        """The micro-batches that generation batch `generation` is cut into: those of its first iteration."""
        first = generation * self.plan.micro_batches_per_generation
        return (self._micro_batch(first + part) for part in range(self.plan.steps_per_generation))

    def generations_until(self, steps: int) -> int:
        """Generation batches that the first `steps` steps train on."""
        if steps == 0:
            return 0
        return self._micro_batch(steps * self.plan.gradient_accumulation_steps - 1).generation + 1

    @property
    def total_generations(self) -> int:
        """Generation batches of the run."""
        return self.generations_until(self.total_steps)

    def first_generation_after(self, step: StepPlan) -> int:
        """The earliest generation batch that a later step trains on."""
        return self._micro_batch(step.step * self.plan.gradient_accumulation_steps).generation

    def _micro_batch(self, index: int) -> MicroBatchPlan:
        """Number `index`, from 0, of the run's stream of micro-batches."""
        generation, within = divmod(index, self.plan.micro_batches_per_generation)
        iteration, part = divmod(within, self.plan.steps_per_generation)
        size = self.plan.rows_per_micro_batch
        rows = range(part * size, (part + 1) * size)
        return MicroBatchPlan(generation, iteration, rows, self.plan.per_device_train_batch_size)


def _steps_per_generation(train: TrainConfig, world_size: int) -> int:
    steps, size = train.steps_per_generation, train.generation_batch_size
    if size is None:
        return steps or train.gradient_accumulation_steps
    if steps is not None:
        what = "give either generation_batch_size or steps_per_generation, not both"
        given = f"generation_batch_size {size} and steps_per_generation {steps}"
        raise ConfigError(what, key="train.generation_batch_size", given=given)
    per_device = train.per_device_train_batch_size
    unit = per_device * world_size
    if size % unit:
        product = f"{per_device} * {world_size} = {unit}"
        what = f"not divisible by per_device_train_batch_size * world size = {product}"
        near = _around(size, [size // unit * unit, (size // unit + 1) * unit])
        raise ConfigError(what, "train.generation_batch_size", given=str(size), nearest=near)
    return size // unit


def _uneven_steps(plan: BatchPlan) -> Problem | None:
    steps, accumulation = plan.steps_per_generation, plan.gradient_accumulation_steps
    if steps % accumulation == 0 or accumulation % steps == 0:
        return None
    multiple = steps // accumulation * accumulation
    candidates = [*_divisors(accumulation), multiple, multiple + accumulation]
    return Problem(
        "neither of steps_per_generation and gradient_accumulation_steps divides the other",
        key="train.steps_per_generation",
        given=f"steps_per_generation {steps}, gradient_accumulation_steps {accumulation}",
        allowed=f"a divisor or a multiple of {accumulation}",
        nearest=_around(steps, candidates),
    )


def _uneven_groups(plan: BatchPlan) -> Problem | None:
    group, size = plan.num_generations, plan.generation_batch_size
    if group >= 2 and size % group == 0:
        return None
    if group < 2:
        what = "a group needs at least 2 completions to compare"
    else:
        what = (
            f"generation batch of {size} completions (per_device_train_batch_size * world size * "
            f"steps_per_generation = {plan.per_device_train_batch_size} * {plan.world_size} * "
            f"{plan.steps_per_generation}) is not divisible by num_generations"
        )
    divisors = [divisor for divisor in _divisors(size) if divisor >= 2]
    allowed = f"a divisor of {size}, at least 2" if divisors else "at least 2, and a larger generation batch"
    return Problem(
        what,
        key="train.num_generations",
        given=str(group),
        allowed=allowed,
        nearest=_around(group, divisors),
    )


def _divisors(number: int) -> list[int]:
    """All divisors, or none of a number too large to look for them: they are only suggestions."""
    if number > 10**12:
        return []
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _around(value: int, candidates: list[int]) -> str:
    """The nearest positive candidates below and above `value`: ``6 or 8``."""
    below = [candidate for candidate in candidates if 0 < candidate < value]
    above = [candidate for candidate in candidates if candidate > value]
    return " or ".join(str(number) for number in (*sorted(below)[-1:], *sorted(above)[:1]))
