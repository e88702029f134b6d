"""The batch arithmetic: how many rows, micro-batches and steps a generation batch makes.

``generation_batch_size = per_device_train_batch_size * world_size * steps_per_generation``, and
``optimizer steps per generation = steps_per_generation * num_iterations / gradient_accumulation_steps``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    from grpox.config import TrainConfig


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


def _steps_per_generation(train: TrainConfig, world_size: int) -> int:
    steps, size = train.steps_per_generation, train.generation_batch_size
    if size is None:
        return steps or train.gradient_accumulation_steps
    if steps is not None:
        what = "give either generation_batch_size or steps_per_generation, not both"
        given = f"generation_batch_size {size} and steps_per_generation {steps}"
        raise ConfigError(Problem(what, key="train.generation_batch_size", given=given))
    per_device = train.per_device_train_batch_size
    unit = per_device * world_size
    if size % unit:
        product = f"{per_device} * {world_size} = {unit}"
        what = f"not divisible by per_device_train_batch_size * world size = {product}"
        near = _around(size, [size // unit * unit, (size // unit + 1) * unit])
        raise ConfigError(Problem(what, "train.generation_batch_size", given=str(size), nearest=near))
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
