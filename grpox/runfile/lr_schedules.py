"""The learning-rate schedules of `train.lr_scheduler_type` and their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpox.config import TrainConfig
from grpox.errors import Problem, nearest
from grpox.errors.validation import problems_of


class Arguments(BaseModel):
    """Arguments of a schedule besides the numbers of steps; subclasses add them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Cosine(Arguments):
    num_cycles: float = Field(0.5, gt=0)
    """Number of cosine waves; with 0.5 the rate falls once."""


class CosineWithRestarts(Arguments):
    num_cycles: int = Field(1, ge=1)
    """Number of falls; each one after the first begins with a jump back to the peak."""


class Polynomial(Arguments):
    lr_end: float = Field(1e-7, ge=0)
    """Learning rate of the last step; must be smaller than the peak."""
    power: float = Field(1.0, gt=0)
    """Exponent of the decay; 1 is a straight line."""


class InverseSqrt(Arguments):
    timescale: int | None = Field(None, ge=1)
    """Steps after which the rate has fallen by a factor of sqrt(2); default: warmup_steps, or 10000 if that is
    0."""


class CosineWithMinLr(Cosine):
    min_lr: float | None = Field(None, ge=0)
    """Learning rate at the end."""
    min_lr_rate: float | None = Field(None, ge=0, le=1)
    """Learning rate at the end as a fraction of the peak."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError("give exactly one of 'min_lr' and 'min_lr_rate'")
        return self


class CosineWarmupWithMinLr(CosineWithMinLr):
    warmup_lr_rate: float | None = Field(None, ge=0, le=1)
    """Learning rate of the first step as a fraction of the peak; default: 1 / warmup_steps."""


class WarmupStableDecay(Arguments):
    num_decay_steps: int = Field(ge=0)
    """Number of last steps, over which the rate falls."""
    num_stable_steps: int | None = Field(None, ge=0)
    """Number of steps at the peak; default: all steps outside warm-up and decay."""
    warmup_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate before the warm-up and after the decay, as a fraction of the peak."""
    num_cycles: float = Field(0.5, gt=0)
    """Number of waves of a cosine decay."""


# Copied, because importing transformers imports torch; a test compares names, defaults and types.
SCHEDULES: dict[str, type[Arguments]] = {
    "linear": Arguments,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "constant": Arguments,
    "constant_with_warmup": Arguments,
    "inverse_sqrt": InverseSqrt,
    "cosine_with_min_lr": CosineWithMinLr,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLr,
    "warmup_stable_decay": WarmupStableDecay,
}
UNSUPPORTED_SCHEDULER_TYPES = {
    "reduce_lr_on_plateau": "follows an evaluation metric",
    "greedy": "follows an evaluation metric",
}
"""Other values of transformers.SchedulerType -> reason why they need a plugin in train.scheduler."""

_KEY = "train.lr_scheduler_kwargs"


def schedule_arguments(train: TrainConfig) -> dict[str, Any]:
    """Return the checked arguments of the schedule, converted to its types."""
    return SCHEDULES[train.lr_scheduler_type](**train.lr_scheduler_kwargs).model_dump(exclude_unset=True)


def schedule_problems(train: TrainConfig) -> Iterator[Problem]:
    """Find mistakes in the schedule's name, arguments and warm-up."""
    warmup = {"warmup_steps": train.warmup_steps, "warmup_ratio": train.warmup_ratio}
    given = [name for name, value in warmup.items() if value]
    name = train.lr_scheduler_type
    if len(given) == 2:
        what = "set only one of warmup_steps and warmup_ratio"
        yield Problem(what, "train.warmup_ratio", given=str(train.warmup_ratio))
    elif given and train.scheduler is None and name == "constant":
        what = "use constant_with_warmup: the schedule 'constant' has no warm-up"
        yield Problem(what, f"train.{given[0]}", given=str(warmup[given[0]]), allowed="0")
    if train.scheduler is not None:
        if train.lr_scheduler_kwargs:
            yield Problem("applies only to lr_scheduler_type, not to train.scheduler", _KEY)
        return
    if name not in SCHEDULES:
        what, near = "no such learning-rate schedule", nearest(name, SCHEDULES)
        if name in UNSUPPORTED_SCHEDULER_TYPES:
            what = (
                f"use a scheduler plugin (train.scheduler): this schedule {UNSUPPORTED_SCHEDULER_TYPES[name]}"
            )
            near = ""
        yield Problem(what, "train.lr_scheduler_type", "", name, ", ".join(SCHEDULES), near)
        return
    try:
        arguments = SCHEDULES[name](**train.lr_scheduler_kwargs)
    except ValidationError as error:
        yield from problems_of(error, SCHEDULES[name], _KEY)
        return
    peak = train.learning_rate  # read last: where it is invalid, all else is checked
    if isinstance(arguments, Polynomial) and arguments.lr_end >= peak:
        what = f"is not below train.learning_rate, {peak:g}"
        yield Problem(what, f"{_KEY}.lr_end", given=f"{arguments.lr_end:g}")
    if isinstance(arguments, CosineWithMinLr) and (rate := arguments.min_lr) is not None and rate > peak:
        yield Problem(f"is above train.learning_rate, {peak:g}", f"{_KEY}.min_lr", given=f"{rate:g}")


def step_problems(train: TrainConfig, warmup_steps: int, total_steps: int) -> list[Problem]:
    """Find parts of the schedule that do not fit into the run's steps, which transformers would accept."""
    if train.lr_scheduler_type == "polynomial" and warmup_steps == total_steps:
        what = f"leaves none of the run's {total_steps} steps for the schedule 'polynomial'"
        return [Problem(what, "train.warmup_steps", given=str(warmup_steps))]
    decay = schedule_arguments(train).get("num_decay_steps", 0)
    if decay and warmup_steps + decay > total_steps:
        what = f"{warmup_steps} warm-up and {decay} decay steps are more than the run's {total_steps}"
        return [Problem(what, f"{_KEY}.num_decay_steps", given=str(decay))]
    return []
