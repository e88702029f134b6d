"""Values that reward functions log are finite, keep the function's label and never replace the trainer's
own."""

import math
import time
from types import SimpleNamespace

import pytest
from reward_tables import score

from grpox.checkpoint.progress import TrainingState
from grpox.errors import RunFailed
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import weighed_mean_logged, with_logged
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.training.step_report import StepReport


def scored(*functions, on_error="fail", count=2):
    rewards = [NamedReward(f"f{place}", f, on_error=on_error) for place, f in enumerate(functions)]
    return score(rewards, ["p"] * count, ["c"] * count, [[1]] * count, {})


def logs(*calls, columns=None):
    def function(completions, log_metric, log_extra):
        for name, value in calls:
            log_metric(name, value)
        for name, values in (columns or {}).items():
            log_extra(name, values)
        return [0.0] * len(completions)

    return function


def test_a_metric_is_the_mean_over_the_calls_of_its_function():
    table = scored(logs(("a", 1), ("a", 4), ("b", 2)), logs(("a", 5.0)))
    assert table.metrics == {"a": {"f0": 2.5, "f1": 5.0}, "b": {"f0": 2.0}}


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_a_metric_that_is_no_finite_number_is_refused_where_it_is_logged(value):
    with pytest.raises(RunFailed, match=r"'f0' raised ValueError: log_metric\('a', .*test_reward_logs.py:\d+"):
        scored(logs(("a", value)))


def test_ranks_and_batches_are_averaged_label_by_label_in_a_fixed_order():
    ranks = [{"b": {"f": 1.0}, "a": {"f": 1.0}}, {}, {"a": {"f": 2.0, "g": 7.0}}]
    merged = weighed_mean_logged((rank, 1) for rank in ranks)
    assert merged == {"a": {"f": 1.5, "g": 7.0}, "b": {"f": 1.0}}
    assert [*merged] == ["a", "b"]


def test_a_name_of_the_trainers_own_is_told_under_the_functions_label():
    own = {"loss": 0.25, "reward": 1.0}
    metrics, renamed = with_logged(own, {"loss": {"f": 9.0, "g": 8.0}, "seen": {"f": 1.0, "g": 3.0}})
    assert metrics == {"loss": 0.25, "reward": 1.0, "f/loss": 9.0, "g/loss": 8.0, "seen": 2.0}
    for line, label in zip(renamed, ["f", "g"], strict=True):
        assert line.startswith(f"reward '{label}' logs 'loss'")
        assert line.endswith(f" '{label}/loss'")


def test_a_column_that_several_functions_log_is_told_for_each():
    table = scored(logs(columns={"length": [1, 2], "own": [3, 4]}), logs(columns={"length": [5, 6]}))
    assert table.extra_columns == {"f0/length": [1, 2], "own": [3, 4], "f1/length": [5, 6]}


def test_a_column_of_another_length_is_a_failure_of_its_function():
    short = logs(columns={"length": [1]})
    with pytest.raises(RunFailed, match="'f0' logged 1 values of log_extra column 'length' for 2 completions"):
        scored(short)
    table = scored(short, logs(columns={"length": [1, 2]}), on_error="abstain")
    assert table.failed == [[True, True], [False, False]]
    assert table.extra_columns == {"length": [1, 2]}


def test_what_a_failed_call_logged_is_dropped():
    def broken(completions, log_metric):
        log_metric("a", 1.0)
        raise OSError("down")

    assert scored(broken, on_error="abstain").metrics == {}


def test_a_steps_report_keeps_the_trainers_loss_and_tells_the_functions_beside_it(logged):
    told = []
    sampler = SimpleNamespace(times=PhaseTimes())
    report = StepReport(
        context=None,
        state=TrainingState(),
        collector=SimpleNamespace(sampler=sampler, metrics=lambda batch: {}),
        observers=SimpleNamespace(failures={}, step_finished=lambda *arguments: told.append(arguments[2])),
        warn=WarnOnce(get_logger("grpox.test")),
        is_main=True,
    )
    metrics = {"loss": {"f": 42.0}, "epoch": {"f": 7.0}, "seen": {"f": 1.0, "g": 2.0}}
    for step in (1, 2):
        batch = SimpleNamespace(rollouts=[], rows=[], dropped=[], logged=metrics)
        for phase in ("generate", "update"):
            with sampler.times.phase(phase):
                time.sleep(0.001)
        report.step_finished(step, float(step), [batch], [], {"loss": 0.5}, seconds=1.0)
    assert [(m["loss"], m["f/loss"], m["epoch"], m["f/epoch"], m["seen"]) for m in told] == [
        (0.5, 42.0, 1.0, 7.0, 1.5),
        (0.5, 42.0, 2.0, 7.0, 1.5),
    ]
    assert logged().count("warning: reward 'f' logs 'loss'") == 1


def test_what_a_function_does_later_to_what_it_has_logged_changes_no_record():
    details = {"seen": []}

    def reuses(completions, log_extra):
        for completion in completions:
            details["seen"].append(completion)
            log_extra("details", [details])
        return [0.0] * len(completions)

    table = scored(reuses)
    details["seen"].clear()
    assert table.extra_columns == {"details": [{"seen": ["c"]}, {"seen": ["c", "c"]}]}
