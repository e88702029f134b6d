"""The learning-rate schedules of `train.lr_scheduler_type` and their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from grpox.config import TrainConfig
from grpox.errors import Problem, nearest
from grpox.errors.validation import problems_of

_CYCLES = (float, Field(0.5, gt=0))
_PART = (float | None, Field(None, ge=0, le=1))
_SHAPE = Literal["linear", "cosine", "1-sqrt"]
_MIN_LR = {"num_cycles": _CYCLES, "min_lr": (float | None, Field(None, ge=0)), "min_lr_rate": _PART}
# Copied, because importing transformers imports torch; a test compares names, defaults and types.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": _CYCLES},
    "cosine_with_restarts": {"num_cycles": (int, Field(1, ge=1))},
    "polynomial": {"lr_end": (float, Field(1e-7, ge=0)), "power": (float, Field(1.0, gt=0))},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": (int | None, Field(None, ge=1))},
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": {**_MIN_LR, "warmup_lr_rate": _PART},
    "warmup_stable_decay": {
        "num_decay_steps": (int, Field(ge=0)),
        "num_stable_steps": (int | None, Field(None, ge=0)),
        "warmup_type": (_SHAPE, "linear"),
        "decay_type": (_SHAPE, "cosine"),
        "min_lr_ratio": (float, Field(0.0, ge=0, le=1)),
        "num_cycles": _CYCLES,
    },
}
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
SCHEDULES: dict[str, type[BaseModel]] = {
    name: create_model(name, __config__=_STRICT, **fields) for name, fields in _ARGUMENTS.items()
}
"""Schedule -> its arguments besides the numbers of steps."""
UNSUPPORTED_SCHEDULER_TYPES = ("reduce_lr_on_plateau", "greedy")
"""Other values of transformers.SchedulerType: they follow an evaluation metric."""

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
            what = "use a scheduler plugin (train.scheduler): this schedule follows an evaluation metric"
            near = ""
        yield Problem(what, "train.lr_scheduler_type", "", name, ", ".join(SCHEDULES), near)
        return
    try:
        values = SCHEDULES[name](**train.lr_scheduler_kwargs).model_dump()
    except ValidationError as error:
        yield from problems_of(error, SCHEDULES[name], _KEY)
        return
    if "min_lr" in values and (values["min_lr"] is None) == (values["min_lr_rate"] is None):
        yield Problem("give exactly one of 'min_lr' and 'min_lr_rate'", _KEY)
        return
    peak = train.learning_rate  # read last: where it is invalid, all else is checked
    if (end := values.get("lr_end", -1)) >= peak:
        yield Problem(f"is not below train.learning_rate, {peak:g}", f"{_KEY}.lr_end", given=f"{end:g}")
    if (rate := values.get("min_lr") or 0) > peak:
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
