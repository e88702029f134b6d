"""The schedule: the rows and the generation batch of each optimizer step.

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
    """Numbers of rows, micro-batches and steps of a run, with TRL's names."""

    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int = 1

    @property
    def rows_per_micro_batch(self) -> int:
        """Number of rows in one micro-batch over all ranks."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def generation_batch_size(self) -> int:
        """Number of completions in one generation batch over all ranks."""
        return self.rows_per_micro_batch * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """Number of unique prompts in one generation batch."""
        return self.generation_batch_size // self.num_generations

    @property
    def train_batch_size(self) -> int:
        """Number of samples in one optimizer step over all ranks."""
        return self.rows_per_micro_batch * self.gradient_accumulation_steps

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches drawn from one generation batch, over all its iterations."""
        return self.steps_per_generation * self.num_iterations

    @property
    def optimizer_steps_per_generation(self) -> Fraction:
        """Number of optimizer steps; below 1 if a step spans several generation batches."""
        return Fraction(self.micro_batches_per_generation, self.gradient_accumulation_steps)

    @classmethod
    def from_config(cls, train: TrainConfig, world_size: int) -> BatchPlan:
        """Build the plan of `train` on `world_size` ranks.

        Raises:
            ConfigError: a size is not divisible as required; the message names the nearest valid sizes.
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
    """Number of the generation batch in the run, from 0."""
    iteration: int
    """Number of the pass over the generation batch, from 0."""
    rows: range
    """Rows of the generation batch over all ranks; row r belongs to prompt number r // G."""
    rows_per_rank: int

    def rank_rows(self, rank: int) -> range:
        """Return the rows that `rank` trains on."""
        start = self.rows.start + rank * self.rows_per_rank
        return range(start, start + self.rows_per_rank)


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step."""

    step: int
    """Number of the step, from 1."""
    micro_batches: tuple[MicroBatchPlan, ...]

    @property
    def generations(self) -> range:
        """Numbers of the generation batches that the step trains on."""
        return range(self.micro_batches[0].generation, self.micro_batches[-1].generation + 1)


class PromptSampler:
    """Draws the prompts of each generation batch: shuffled once per epoch, then cut into chunks."""

    def __init__(self, num_prompts: int, prompts_per_generation: int, shuffle: bool, seed: int) -> None:
        """
        Raises:
            ConfigError: there are fewer prompts than one generation batch needs.
        """
        if num_prompts < prompts_per_generation:
            raise _too_few(num_prompts, prompts_per_generation)
        self.prompts_per_epoch = num_prompts
        self.prompts_per_generation = prompts_per_generation
        self.generations_per_epoch = num_prompts // prompts_per_generation
        """Number of whole chunks; the remainder at the end of an epoch is dropped."""
        self._shuffle = shuffle
        self._seed = seed
        self._cached: tuple[int, list[int]] = (-1, [])

    def prompts_for(self, generation: int) -> list[int]:
        """Return dataset indices of the unique prompts of generation batch `generation` (from 0)."""
        epoch, chunk = divmod(generation, self.generations_per_epoch)
        first = epoch * self.prompts_per_epoch + chunk * self.prompts_per_generation
        return self.prompts_at(range(first, first + self.prompts_per_generation))

    def prompts_at(self, positions: range, keep_from: int | None = None) -> list[int]:
        """Return dataset indices of the prompts at these positions of the order, epoch after epoch.

        Args:
            keep_from: ignored here; a stream uses it to keep rows in memory.
        """
        indices: list[int] = []
        while positions:
            epoch, place = divmod(positions.start, self.prompts_per_epoch)
            indices += self._order(epoch)[place : place + len(positions)]
            positions = positions[self.prompts_per_epoch - place :]
        return indices

    def batch_at(self, position: int) -> int:
        """Return the position of the next generation batch; skip the rest of an epoch if it is too short."""
        left = self.prompts_per_epoch - position % self.prompts_per_epoch
        return position if left >= self.prompts_per_generation else position + left

    def _order(self, epoch: int) -> list[int]:
        if self._cached[0] != epoch:
            order = list(range(self.prompts_per_epoch))
            if self._shuffle:
                random.Random(self._seed + epoch).shuffle(order)
            self._cached = epoch, order
        return self._cached[1]


class StreamSampler:
    """Draws the next prompts of a stream for each generation batch, across the ends of epochs."""

    def __init__(self, stream: RowStream, prompts: PromptSet, prompts_per_generation: int) -> None:
        """
        Args:
            prompts: prompts of `stream`; checked when they are read.

        Raises:
            ConfigError: an epoch has fewer prompts than one generation batch needs.
            RunFailed: the first generation batch cannot be read, or has a row without a valid prompt.
        """
        self.prompts_per_generation = prompts_per_generation
        self._stream = stream
        self._prompts = prompts
        self.prompts_for(0)

    @property
    def generations_per_epoch(self) -> float:
        """Number of generation batches in an epoch, with a last partial one; infinite in the first epoch."""
        return self.prompts_per_epoch / self.prompts_per_generation

    @property
    def prompts_per_epoch(self) -> float:
        """Number of prompts in an epoch; infinite until the first epoch has ended."""
        rows = self._stream.rows_per_epoch
        return math.inf if rows is None else rows

    def prompts_for(self, generation: int) -> list[int]:
        """Return the stream positions of the prompts of generation batch `generation`; forget earlier rows.

        Raises:
            RunFailed: the stream cannot be read, or has a row without a valid prompt.
        """
        first = generation * self.prompts_per_generation
        return self.prompts_at(range(first, first + self.prompts_per_generation))

    def batch_at(self, position: int) -> int:
        """Return the position of the next generation batch."""
        return position

    def prompts_at(self, positions: range, keep_from: int | None = None) -> list[int]:
        """Read the prompts at these positions and return the positions; forget earlier rows.

        Args:
            keep_from: position of the first prompt to keep in memory; default: the first of `positions`.

        Raises:
            RunFailed: see `prompts_for`.
        """
        self._stream.hold(range(positions.start if keep_from is None else keep_from, positions.stop))
        rows = self._stream.rows_per_epoch
        if rows is not None and rows < self.prompts_per_generation:
            raise _too_few(rows, self.prompts_per_generation)
        self._prompts.check(positions)
        return list(positions)


class PromptCursor:
    """Draws any number of next prompts of the seeded order.

    If no batch draws extra prompts, the prompts equal the schedule's: a batch lies within one epoch, and the
    rest of an epoch is dropped. Extra prompts of a batch may continue in the next epoch. The only state is the
    position in the order, which is the same on every rank.
    """

    def __init__(self, sampler: PromptSampler | StreamSampler) -> None:
        self._sampler = sampler
        self._position = 0
        self._batch = 0

    @property
    def position(self) -> int:
        """Number of prompts drawn so far over all epochs; checkpoints save it."""
        return self._position

    @property
    def epoch(self) -> float:
        """Number of passes over the prompts so far."""
        return self._position / self._sampler.prompts_per_epoch

    def restore(self, position: int) -> None:
        """Continue from `position`; a stream is read up to there."""
        self._position = position
        if position:
            self._sampler.prompts_at(range(position - 1, position))

    def batch(self) -> list[int]:
        """Return dataset indices of the first prompts of the next generation batch."""
        self._position = self._batch = self._sampler.batch_at(self._position)
        return self.more(self._sampler.prompts_per_generation)

    def more(self, count: int) -> list[int]:
        """Return dataset indices of `count` extra prompts for the same batch."""
        first, self._position = self._position, self._position + count
        return self._sampler.prompts_at(range(first, self._position), keep_from=self._batch)


def _too_few(num_prompts: int, prompts_per_generation: int) -> ConfigError:
    what = f"one generation batch needs {prompts_per_generation} prompts, but the data has {num_prompts}"
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
            max_steps: optimizer steps; below 0: the steps of the whole generation batches in `epochs` epochs,
                at least one. A stream needs a number.
        """
        self.plan = plan
        self.sampler = sampler
        self.total_steps = max_steps
        if max_steps < 0:
            # Computed in decimal: 0.29 * 100 generations are 29, but not in floating point.
            generations = int(Fraction(str(epochs)) * sampler.generations_per_epoch)
            self.total_steps = max(1, int(generations * plan.optimizer_steps_per_generation))

    def steps(self, start: int = 0) -> Iterator[StepPlan]:
        """Yield the steps that remain after `start` steps."""
        accumulation = self.plan.gradient_accumulation_steps
        for done in range(start, self.total_steps):
            first = done * accumulation
            yield StepPlan(done + 1, tuple(map(self._micro_batch, range(first, first + accumulation))))

    def slices_of(self, generation: int) -> list[MicroBatchPlan]:
        """Return the micro-batches of the first pass over generation batch `generation`."""
        first = generation * self.plan.micro_batches_per_generation
        return list(map(self._micro_batch, range(first, first + self.plan.steps_per_generation)))

    def first_steps(self, generation: int) -> list[int]:
        """List the step that first trains on each of `slices_of(generation)`."""
        first = generation * self.plan.micro_batches_per_generation
        parts = range(first, first + self.plan.steps_per_generation)
        return [index // self.plan.gradient_accumulation_steps + 1 for index in parts]

    def generations_until(self, steps: int) -> int:
        """Count the generation batches that the first `steps` steps train on."""
        if steps == 0:
            return 0
        return self._micro_batch(steps * self.plan.gradient_accumulation_steps - 1).generation + 1

    @property
    def total_generations(self) -> int:
        """Number of generation batches in the run."""
        return self.generations_until(self.total_steps)

    def first_generation_after(self, step: StepPlan) -> int:
        """Return the earliest generation batch that a later step trains on."""
        return self._micro_batch(step.step * self.plan.gradient_accumulation_steps).generation

    def _micro_batch(self, index: int) -> MicroBatchPlan:
        """Return micro-batch number `index` of the run, from 0."""
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
        what = "set either generation_batch_size or steps_per_generation, not both"
        given = f"generation_batch_size {size} and steps_per_generation {steps}"
        raise ConfigError(what, key="train.generation_batch_size", given=given)
    per_device = train.per_device_train_batch_size
    unit = per_device * world_size
    if size % unit:
        product = f"{per_device} * {world_size} = {unit}"
        what = f"must be divisible by per_device_train_batch_size * world size = {product}"
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
        "either steps_per_generation or gradient_accumulation_steps must divide the other",
        key="train.steps_per_generation",
        given=f"steps_per_generation {steps}, gradient_accumulation_steps {accumulation}",
        allowed=f"a divisor or a multiple of {accumulation}",
        nearest=_around(steps, candidates),
    )


def _uneven_groups(plan: BatchPlan) -> Problem | None:
    group, size = plan.num_generations, plan.generation_batch_size
    if size % group == 0:
        return None
    sizes = f"{plan.per_device_train_batch_size} * {plan.world_size} * {plan.steps_per_generation}"
    named = f"per_device_train_batch_size * world size * steps_per_generation = {sizes}"
    what = f"generation batch of {size} completions ({named}) is not divisible by num_generations"
    divisors = [divisor for divisor in _divisors(size) if divisor >= 2]
    allowed = f"a divisor of {size}, at least 2" if divisors else "at least 2, and a larger generation batch"
    near = _around(group, divisors)
    return Problem(what, "train.num_generations", given=str(group), allowed=allowed, nearest=near)


def _divisors(number: int) -> list[int]:
    """List all divisors, as suggestions; none for a number that is too large to search."""
    if number > 10**12:
        return []
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _around(value: int, candidates: list[int]) -> str:
    """Write the nearest positive candidates below and above `value`: ``6 or 8``."""
    below = [candidate for candidate in candidates if 0 < candidate < value]
    above = [candidate for candidate in candidates if candidate > value]
    return " or ".join(str(number) for number in (*sorted(below)[-1:], *sorted(above)[:1]))
