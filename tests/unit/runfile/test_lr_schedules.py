"""Learning-rate schedules: rates worked by hand, and arguments refused before anything is loaded."""

from __future__ import annotations

import inspect
import math
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
import torch
from transformers import SchedulerType
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from grpox.config import TrainConfig
from grpox.errors import ConfigError
from grpox.policy.optimizers import NamedSchedule, warmup_steps_of
from grpox.runfile.lr_schedules import (
    SCHEDULES,
    UNSUPPORTED_SCHEDULER_TYPES,
    schedule_arguments,
    schedule_problems,
)

STEPS_AND_STATE = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 4},
}
"""Arguments of the schedules that need some."""


def train_config(name: str = "linear", /, **values: Any) -> TrainConfig:
    return TrainConfig.model_validate({"learning_rate": 0.01, "lr_scheduler_type": name, **values})


def rates(config: TrainConfig, total_steps: int = 10) -> list[float]:
    """The learning rate of each optimizer step, as a part of the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = NamedSchedule(config).build(optimizer, total_steps)
    found = []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    return found


def told(config: TrainConfig) -> list[tuple[str, str, str]]:
    return [(problem.key, problem.what, problem.nearest) for problem in schedule_problems(config)]


def test_every_schedule_of_transformers_is_known() -> None:
    assert {*SCHEDULES, *UNSUPPORTED_SCHEDULER_TYPES} == {member.value for member in SchedulerType}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedules_arguments_and_their_types_are_those_of_its_function(name: str) -> None:
    function = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    theirs = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in STEPS_AND_STATE
    }
    ours = {
        key: inspect.Parameter.empty if field.is_required() else field.default
        for key, field in SCHEDULES[name].model_fields.items()
    }
    assert ours == theirs
    declared = get_type_hints(function)
    for key, field in SCHEDULES[name].model_fields.items():
        members = get_args(field.annotation) or (field.annotation,)
        types = {type(member) if isinstance(member, str) else member for member in members}
        expected = set(get_args(declared[key]) or (declared[key],)) if key in declared else {float}
        assert types - {NoneType} == expected - {NoneType}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_ends_a_run(name: str) -> None:
    warmup = 0 if name == "constant" else 2
    config = train_config(name, warmup_steps=warmup, lr_scheduler_kwargs=ARGUMENTS.get(name, {}))
    assert list(schedule_problems(config)) == []
    found = rates(config)
    assert max(found) == pytest.approx(1)
    if warmup and name != "cosine_warmup_with_min_lr":
        assert found[:2] == [0, 0.5]


def test_rates_worked_by_hand() -> None:
    assert rates(train_config("linear", warmup_steps=2), 6) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
    # Warm-up, stable and decay share the steps.
    kwargs = {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.2}
    config = train_config("warmup_stable_decay", warmup_steps=2, lr_scheduler_kwargs=kwargs)
    assert rates(config, 9) == pytest.approx([0.2, 0.6, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    # With peak 0.01 and least 0.002: 0.2 + 0.8 * (1 + cos(pi t / 4)) / 2.
    config = train_config("cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.002})
    half = math.sqrt(0.5)
    assert rates(config, 4) == pytest.approx([1, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half])
    as_rate = train_config("cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.2})
    assert rates(as_rate, 4) == pytest.approx(rates(config, 4))
    # A warm-up ratio is rounded up.
    for ratio, total, steps in ((0.1, 20, 2), (0.1, 21, 3), (0.0, 20, 0), (0.5, 1, 1)):
        assert warmup_steps_of(train_config(warmup_ratio=ratio), total) == steps
    assert rates(train_config(warmup_ratio=0.2)) == rates(train_config(warmup_steps=2))


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "what"),
    [
        ("linear", {"power": 2}, "power", "unknown key"),
        ("constant_with_warmup", {"power": 2}, "power", "unknown key"),
        ("warmup_stable_decay", {}, "num_decay_steps", "a value is required"),
        ("warmup_stable_decay", {"num_decay_steps": "many"}, "num_decay_steps", "should be a valid integer"),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "a"}, "decay_type", "should be 'linear'"),
        ("cosine_with_restarts", {"num_cycles": 0.5}, "num_cycles", "should be a valid integer"),
        ("cosine_with_min_lr", {}, "", "give exactly one of 'min_lr' and 'min_lr_rate'"),
        ("cosine_with_min_lr", {"min_lr": 1e-4, "min_lr_rate": 0.1}, "", "give exactly one of"),
        ("cosine_with_min_lr", {"min_lr_rate": 1.5}, "min_lr_rate", "should be less than or equal to 1"),
        ("cosine_with_min_lr", {"min_lr": 0.02}, "min_lr", "is above train.learning_rate, 0.01"),
        ("polynomial", {"lr_end": 0.01}, "lr_end", "is not below train.learning_rate, 0.01"),
        ("inverse_sqrt", {"timescale": 0}, "timescale", "should be greater than or equal to 1"),
    ],
)
def test_arguments_that_make_no_schedule(name: str, kwargs: dict[str, Any], key: str, what: str) -> None:
    [(told_key, told_what, _)] = told(train_config(name, lr_scheduler_kwargs=kwargs))
    assert told_key == "train.lr_scheduler_kwargs" + (f".{key}" if key else "")
    assert told_what.startswith(what)


DECAY = {"lr_scheduler_kwargs": {"power": 2}, "scheduler": "mine"}


@pytest.mark.parametrize(
    ("name", "values", "key", "what", "near"),
    [
        ("cosin", {}, "lr_scheduler_type", "no such learning-rate schedule", "cosine"),
        ("reduce_lr_on_plateau", {}, "lr_scheduler_type", "use a scheduler plugin (train.scheduler)", ""),
        ("constant", {"warmup_steps": 2}, "warmup_steps", "use constant_with_warmup", ""),
        ("constant", {"warmup_ratio": 0.5}, "warmup_ratio", "use constant_with_warmup", ""),
        ("linear", {"warmup_steps": 2, "warmup_ratio": 0.5}, "warmup_ratio", "set only one of", ""),
        # The default end, above a small peak.
        ("polynomial", {"learning_rate": 1e-7}, "lr_scheduler_kwargs.lr_end", "is not below", ""),
        ("linear", DECAY, "lr_scheduler_kwargs", "applies only to lr_scheduler_type", ""),
    ],
)
def test_schedules_and_warm_ups_that_are_none(
    name: str, values: dict[str, Any], key: str, what: str, near: str
) -> None:
    [(told_key, told_what, told_near)] = told(train_config(name, **values))
    assert (told_key, told_near) == (f"train.{key}", near)
    assert told_what.startswith(what)
    slip = train_config("cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1, "num_cycle": 1})
    assert told(slip) == [("train.lr_scheduler_kwargs.num_cycle", "unknown key", "num_cycles")]


def test_decay_and_warm_up_that_fill_more_than_the_run_are_refused() -> None:
    config = train_config("warmup_stable_decay", warmup_steps=3, lr_scheduler_kwargs={"num_decay_steps": "4"})
    assert schedule_arguments(config) == {"num_decay_steps": 4}  # in its type
    assert rates(config, 7)[3] == 1
    with pytest.raises(ConfigError, match="3 warm-up and 4 decay steps are more than the run's 6"):
        rates(config, 6)
    # A polynomial needs a step besides its warm-up: else transformers divides by zero after the last step.
    with pytest.raises(ConfigError, match="leaves none of the run's 5 steps"):
        rates(train_config("polynomial", warmup_steps=5), 5)
    assert rates(train_config("polynomial", warmup_steps=6), 5) == pytest.approx([i / 6 for i in range(5)])
