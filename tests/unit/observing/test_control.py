"""Observers change a run through its control, between two steps; without a gain it stops by itself."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import Field
from support.contexts import config_of

from grpox.config import EarlyStopConfig, Parameters
from grpox.errors import ConfigError, RunFailed
from grpox.observing.control import ControlState
from grpox.observing.early_stop import EarlyStop, EarlyStopState, describe_early_stop
from grpox.observing.observers import ReadOnlyMetrics
from grpox.runtime.world import World
from grpox.training.steering import Steering
from grpox.update.objective import StepLoss
from grpox_mlflow.link import tags_of

ALONE = World(0, 1, torch.device("cpu"))


class ClipConfig(Parameters):
    clip: float = Field(0.2, gt=0, lt=1)
    name: str = "x"


class Loss:
    """A loss with one setting that may change."""

    hyperparameters: Any = ("clip",)
    reduction = None

    def __init__(self) -> None:
        self.config = ClipConfig()


def steering(beta: float = 0.0, loss: Any = None, state: ControlState | None = None, **train: Any) -> Any:
    loss = loss or Loss()
    rates: list[float] = []
    engine = SimpleNamespace(scale_learning_rate=rates.append, rates=rates)
    policy: Any = SimpleNamespace(engine=engine, step_loss=StepLoss(loss, loss, beta=beta))
    config = config_of(train={"beta": beta, **train})
    return Steering(ALONE, policy, {"loss": loss}, config, state or ControlState(), True), policy, loss


def test_only_what_the_run_has_and_does_not_move_itself_can_change() -> None:
    assert dict(steering()[0].control.hyperparameters) == {"learning_rate_factor": 1.0, "loss.clip": 0.2}
    assert dict(steering(beta=0.1)[0].control.hyperparameters)["beta"] == 0.1
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
def test_an_impossible_change_is_refused(name: str, value: float, facts: tuple[str, ...]) -> None:
    steered, _, loss = steering()
    with pytest.raises(ValueError, match=name) as refused:
        steered.control.set(name, value)
    assert [fact for fact in facts if fact not in str(refused.value)] == []
    steered.apply()
    assert loss.config.clip == 0.2


def test_a_hyperparameter_must_be_a_number_of_the_config() -> None:
    for name in ("clp", "name"):
        loss = Loss()
        loss.hyperparameters = (name,)
        with pytest.raises(ConfigError, match=name):
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


# -- Early stopping --------------------------------------------------------------------------------------


def stopped_after(values: list[float], **config: Any) -> int | None:
    """The evaluation, counted from 0, after which it stops."""
    stop = EarlyStop(EarlyStopConfig(metric="accuracy", **config))
    for step, value in enumerate(values):
        stop.see(step, {"accuracy": value})
        if stop.stops:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "config", "expected"),
    [
        ([0.1, 0.2, 0.2], {}, 2),
        ([0.1, 0.2, 0.3], {}, None),
        ([0.5, 0.4, 0.6, 0.5, 0.4], {"patience": 2}, 4),
        # Two small steps that together are a gain over the last one that counted.
        ([0.50, 0.54, 0.58, 0.60], {"patience": 2, "min_delta": 0.05}, None),
        ([0.50, 0.54, 0.54, 0.60], {"patience": 2, "min_delta": 0.05}, 2),
        ([0.25, 0.5], {"min_delta": 0.25}, 1),  # a gain is more than min_delta
        ([3.0, 2.0, 2.5], {"mode": "min"}, 2),
        ([0.2, math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 0.1, 0.2], {"patience": 2}, None),
    ],
)
def test_a_run_stops_without_a_gain(values: list[float], config: dict[str, Any], expected: int | None) -> None:
    assert stopped_after(values, **config) == expected


def test_a_run_that_goes_on_stops_where_it_would_have_stopped() -> None:
    config, values = EarlyStopConfig(metric="evaluation/accuracy", patience=3), [0.3, 0.7, 0.6, 0.6, 0.6]
    for killed in range(1, 5):
        before, after = EarlyStop(config), EarlyStop(config)
        for step in range(killed):
            before.see(step, {"accuracy": values[step]})
        after.restore(EarlyStopState.model_validate_json(before.state.model_dump_json()))
        stops = []
        for step in range(killed, 5):
            after.see(step, {"accuracy": values[step]})
            stops.append(after.stops)
        assert stops == [step == 4 for step in range(killed, 5)]
        assert (after.state.best, after.state.best_step) == (0.7, 1)


def test_the_state_of_another_metric_is_nothing_to_go_on_from() -> None:
    state = EarlyStopState(metric="accuracy", mode="max", best=0.5, without_gain=7)
    for changed in ({"metric": "reward"}, {"mode": "min"}):
        stop = EarlyStop(EarlyStopConfig(**{"metric": "accuracy"} | changed))
        stop.restore(state)
        stop.restore(None)
        assert (stop.state.best, stop.state.without_gain) == (None, 0)


def test_a_metric_that_is_not_there_ends_the_run_at_its_first_evaluation() -> None:
    stop = EarlyStop(EarlyStopConfig(metric="judge/score"))
    with pytest.raises(RunFailed, match=r"no metric judge/score.*accuracy, judge/scores\n.*mean  judge/scores"):
        stop.see(0, {"accuracy": 0.5, "judge/scores": 1.0})
    stop.see(0, {"judge/score": 1.0})
    stop.see(1, {})  # a later one may lack it: that is no gain
    assert stop.stops
    # Completions that ended may be missing at first.
    for name in ("completions/mean_terminated_length", "hard/completions/mean_terminated_length"):
        stop = EarlyStop(EarlyStopConfig(metric=name, patience=2))
        stop.see(0, {"accuracy": 0.5})
        assert stop.state.without_gain == 1


def test_terminal_and_mlflow_show_step_and_reason(tmp_path: Path) -> None:
    stop = EarlyStop(EarlyStopConfig(metric="accuracy", patience=2))
    for step, value in ((0, 0.25), (20, 0.5), (40, 0.5), (60, 0.4)):
        stop.see(step, {"accuracy": value})
    summary = stop.summary(60)
    sentence = describe_early_stop(summary)
    for fact in ("after step 60", "evaluation/accuracy was best after step 20, at 0.5", "since then: 2"):
        assert fact in sentence
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 60, "stopped_early": summary}))
    assert tags_of(tmp_path)["grpox.stopped_early"] == sentence
    assert "evaluation/accuracy never had a value" in describe_early_stop(summary | {"best": None})
    assert "was best before training" in describe_early_stop(summary | {"best_step": 0})
