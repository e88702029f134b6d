"""When a run stops because its evaluations show no more gain."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpox.config import EarlyStopConfig
from grpox.errors import RunFailed
from grpox.observing.early_stop import EarlyStop, EarlyStopState, describe_early_stop
from grpox_mlflow.link import tags_of


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
        ([0.5, 0.4, 0.3, 0.6], {"patience": 3}, None),
        # Two small steps that together are a gain over the last one that counted.
        ([0.50, 0.54, 0.58, 0.60], {"patience": 2, "min_delta": 0.05}, None),
        ([0.50, 0.54, 0.54, 0.60], {"patience": 2, "min_delta": 0.05}, 2),
        ([0.25, 0.5], {"min_delta": 0.25}, 1),  # a gain is more than min_delta
        ([3.0, 2.0, 2.5], {"mode": "min"}, 2),
        ([0.2, math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 0.1, 0.2], {"patience": 2}, None),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_a_gain(
    values: list[float], config: dict[str, Any], expected: int | None
) -> None:
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


@pytest.mark.parametrize("changed", [{"metric": "reward"}, {"mode": "min"}])
def test_what_a_checkpoint_kept_of_another_metric_is_nothing_to_go_on_from(changed: dict[str, Any]) -> None:
    state = EarlyStopState(metric="accuracy", mode="max", best=0.5, without_gain=7)
    stop = EarlyStop(EarlyStopConfig(**{"metric": "accuracy"} | changed))
    stop.restore(state)
    stop.restore(None)
    assert (stop.state.best, stop.state.without_gain) == (None, 0)


def test_a_metric_that_is_not_there_ends_the_run_at_its_first_evaluation() -> None:
    stop = EarlyStop(EarlyStopConfig(metric="judge/score"))
    with pytest.raises(
        RunFailed, match=r"has no metric judge/score.*accuracy, judge/scores\n.*mean  judge/scores"
    ):
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
    assert describe_early_stop(summary | {"best": None}).startswith(
        "after step 60: evaluation/accuracy never had a value"
    )
    assert "was best before training" in describe_early_stop(summary | {"best_step": 0})
