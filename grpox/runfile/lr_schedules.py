"""The learning-rate schedules of `train.lr_scheduler_type` and their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpox.config import TrainConfig
from grpox.errors import Problem, nearest
from grpox.errors.validation import problems_of


class Arguments(BaseModel):
    """Arguments of a schedule besides the numbers of steps: none, unless a subclass adds them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Cosine(Arguments):
    num_cycles: float = Field(0.5, gt=0)
    """Waves of the cosine; 0.5 falls once."""


class CosineWithRestarts(Arguments):
    num_cycles: int = Field(1, ge=1)
    """Falls, each but the first after a jump back to the peak."""


class Polynomial(Arguments):
    lr_end: float = Field(1e-7, ge=0)
    """Learning rate of the last step; must be smaller than the peak."""
    power: float = Field(1.0, gt=0)
    """1 falls in a straight line."""


class InverseSqrt(Arguments):
    timescale: int | None = Field(None, ge=1)
    """Steps after which the rate has fallen by sqrt(2); default: warmup_steps, or 10000 without."""


class CosineWithMinLr(Cosine):
    min_lr: float | None = Field(None, ge=0)
    """Learning rate that is reached last."""
    min_lr_rate: float | None = Field(None, ge=0, le=1)
    """The same as a part of the peak."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError("give exactly one of 'min_lr' and 'min_lr_rate'")
        return self


class CosineWarmupWithMinLr(CosineWithMinLr):
    warmup_lr_rate: float | None = Field(None, ge=0, le=1)
    """Learning rate of the first step as a part of the peak; default: 1 / warmup_steps."""


class WarmupStableDecay(Arguments):
    num_decay_steps: int = Field(ge=0)
    """Last steps, over which the rate falls."""
    num_stable_steps: int | None = Field(None, ge=0)
    """Steps at the peak; default: those that warm-up and decay leave."""
    warmup_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate before the warm-up and after the decay, as a part of the peak."""
    num_cycles: float = Field(0.5, gt=0)
    """Waves of a cosine decay."""


# A copy, as importing transformers imports torch; a test compares names, defaults and types.
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
"""Other values of transformers.SchedulerType -> why a plugin in train.scheduler is needed."""

_KEY = "train.lr_scheduler_kwargs"


def schedule_arguments(train: TrainConfig) -> dict[str, Any]:
    """Return the checked arguments of the schedule, converted to its types."""
    return SCHEDULES[train.lr_scheduler_type](**train.lr_scheduler_kwargs).model_dump(exclude_unset=True)


def schedule_problems(train: TrainConfig) -> Iterator[Problem]:
    """Find mistakes in the schedule's name, arguments and warm-up."""
    warmup = {"warmup_steps": train.warmup_steps, "warmup_ratio": train.warmup_ratio}
    given = [name for name, value in warmup.items() if value]
    name, peak = train.lr_scheduler_type, train.learning_rate
    if len(given) == 2:
        what = "give one of warmup_steps and warmup_ratio"
        yield Problem(what, "train.warmup_ratio", given=str(train.warmup_ratio))
    elif given and train.scheduler is None and name == "constant":
        what = "the schedule 'constant' has no warm-up: use constant_with_warmup"
        yield Problem(what, f"train.{given[0]}", given=str(warmup[given[0]]), allowed="0")
    if train.scheduler is not None:
        if train.lr_scheduler_kwargs:
            yield Problem("goes with lr_scheduler_type, not with train.scheduler", _KEY)
        return
    if name not in SCHEDULES:
        what, near = "no such learning-rate schedule", nearest(name, SCHEDULES)
        if name in UNSUPPORTED_SCHEDULER_TYPES:
            what = f"{UNSUPPORTED_SCHEDULER_TYPES[name]}: use a scheduler plugin (train.scheduler) for it"
            near = ""
        yield Problem(what, "train.lr_scheduler_type", "", name, ", ".join(SCHEDULES), near)
        return
    try:
        arguments = SCHEDULES[name](**train.lr_scheduler_kwargs)
    except ValidationError as error:
        yield from problems_of(error, SCHEDULES[name], _KEY)
        return
    if isinstance(arguments, Polynomial) and arguments.lr_end >= peak:
        what = f"is not below train.learning_rate, {peak:g}"
        yield Problem(what, f"{_KEY}.lr_end", given=f"{arguments.lr_end:g}")
    if isinstance(arguments, CosineWithMinLr) and (rate := arguments.min_lr) is not None and rate > peak:
        yield Problem(f"is above train.learning_rate, {peak:g}", f"{_KEY}.min_lr", given=f"{rate:g}")


def step_problems(train: TrainConfig, warmup_steps: int, total_steps: int) -> list[Problem]:
    """Find parts of the schedule that do not fit into the run's steps, which transformers would accept."""
    if train.lr_scheduler_type == "polynomial" and warmup_steps == total_steps:
        what = f"leaves none of the run's {total_steps} steps to the schedule 'polynomial'"
        return [Problem(what, "train.warmup_steps", given=str(warmup_steps))]
    decay = schedule_arguments(train).get("num_decay_steps", 0)
    if decay and warmup_steps + decay > total_steps:
        what = f"{warmup_steps} warm-up and {decay} decay steps are more than the run's {total_steps}"
        return [Problem(what, f"{_KEY}.num_decay_steps", given=str(decay))]
    return []
