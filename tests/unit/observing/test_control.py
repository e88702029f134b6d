"""Observers change a run through its control, between two steps, and in no other way."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import Field

from grpox.config import Parameters, RunConfig
from grpox.errors import ConfigError
from grpox.observing.control import ControlState
from grpox.observing.observers import ReadOnlyMetrics
from grpox.runtime.world import World
from grpox.training.steering import Steering
from grpox.update.objective import StepLoss

ALONE = World(0, 1, torch.device("cpu"))


class ClipConfig(Parameters):
    """The parameters of a loss."""

    clip: float = Field(0.2, gt=0, lt=1)
    """Bound of the ratio."""
    name: str = "x"
    """A text."""


class Loss:
    """A loss with one setting that may change."""

    hyperparameters: Any = ("clip",)
    reduction = None

    def __init__(self) -> None:
        self.config = ClipConfig()


def config_of(**train: Any) -> RunConfig:
    run = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"], "train": train}
    return RunConfig.model_validate(run)


def steering(beta: float = 0.0, loss: Any = None, state: ControlState | None = None, **train: Any) -> Any:
    loss = loss or Loss()
    rates: list[float] = []
    engine = SimpleNamespace(scale_learning_rate=rates.append, rates=rates)
    policy: Any = SimpleNamespace(engine=engine, step_loss=StepLoss(loss, loss, beta=beta))
    config = config_of(beta=beta, **train)
    return Steering(ALONE, policy, {"loss": loss}, config, state or ControlState(), True), policy, loss


def test_only_what_the_run_has_can_change() -> None:
    assert dict(steering()[0].control.hyperparameters) == {"learning_rate_factor": 1.0, "loss.clip": 0.2}
    assert dict(steering(beta=0.1)[0].control.hyperparameters)["beta"] == 0.1


def test_observers_cannot_set_a_coefficient_that_the_run_moves() -> None:
    assert dict(steering(entropy_coef=0.1)[0].control.hyperparameters)["entropy_coef"] == 0.1
    control = steering(entropy_coef=0.1, adaptive_entropy={})[0].control
    assert "entropy_coef" not in control.hyperparameters
    with pytest.raises(ValueError, match=r"entropy_coef.*train\.adaptive_entropy=null"):
        control.set("entropy_coef", 0.2)


def test_a_change_takes_effect_between_two_steps() -> None:
    steered, policy, loss = steering(beta=0.1)
    for name, value in (("beta", 0.3), ("loss.clip", 0.5), ("learning_rate_factor", 0.25)):
        steered.control.set(name, value)
    assert (policy.step_loss.beta, loss.config.clip, policy.engine.rates) == (0.1, 0.2, [])
    assert steered.control.hyperparameters["beta"] == 0.3
    steered.apply()
    assert (policy.step_loss.beta, loss.config.clip, policy.engine.rates) == (0.3, 0.5, [0.25])
    assert steered.state.metrics() == {
        "hyperparameters/beta": 0.3,
        "hyperparameters/loss.clip": 0.5,
        "hyperparameters/learning_rate_factor": 0.25,
    }


def test_a_resumed_run_has_the_changes_of_its_checkpoint() -> None:
    steered, policy, loss = steering(beta=0.1, state=ControlState({"beta": 0.3, "loss.clip": 0.5}))
    steered.restore()
    assert (policy.step_loss.beta, loss.config.clip) == (0.3, 0.5)
    with pytest.raises(ConfigError, match="no hyperparameter 'beta'"):
        steering(state=ControlState({"beta": 0.3}))[0].restore()


@pytest.mark.parametrize(
    ("name", "value", "facts"),
    [
        ("loss.clp", 0.3, ("did you mean loss.clip", "learning_rate_factor")),
        ("loss.clip", 1.5, ("loss.clip = 1.5", "less than 1")),
        ("learning_rate_factor", -1.0, ("is negative",)),
        ("loss.clip", math.nan, ("not a finite number",)),
        ("loss.clip", True, ("not a finite number",)),
    ],
)
def test_an_impossible_change_is_refused_where_it_is_asked_for(
    name: str, value: float, facts: tuple[str, ...]
) -> None:
    steered, _, loss = steering()
    with pytest.raises(ValueError, match=name) as refused:
        steered.control.set(name, value)
    assert [fact for fact in facts if fact not in str(refused.value)] == []
    steered.apply()
    assert loss.config.clip == 0.2


@pytest.mark.parametrize("names", [("clp",), ("name",)])
def test_a_hyperparameter_must_be_a_number_of_the_config(names: tuple[str, ...]) -> None:
    loss = Loss()
    loss.hyperparameters = names
    with pytest.raises(ConfigError, match=names[0]):
        steering(loss=loss)


def test_the_first_reason_to_stop_counts() -> None:
    steered, *_ = steering()
    steered.control.stop("enough")
    steered.control.stop("more than enough")
    steered.apply()
    steered.control.stop("late")
    steered.apply()
    assert steered.state.stop_reason == "enough"


def test_read_only_metrics_are_a_dict_to_readers() -> None:
    metrics = ReadOnlyMetrics(loss=0.5)
    assert json.dumps(metrics) == '{"loss": 0.5}'
    own = copy.deepcopy(metrics)
    own["mine"] = 1.0
    assert (own, type(own), metrics | {"a": 1.0}) == ({"loss": 0.5, "mine": 1.0}, dict, {"loss": 0.5, "a": 1.0})
