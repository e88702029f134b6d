"""Alarms: thresholds and patience by hand, one report of each, and where they are shown."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console
from support.contexts import config_of, scored
from support.frozen import answers_of

from grpox.checkpoint.progress import TrainingState
from grpox.config import AlarmsConfig, RewardRef
from grpox.config.alarms import ALLOWED, CHANGED, DIFFERS, EMPTY_TESTS, FIRST, GROWTH, LIVE, NORM_BEFORE, SHARE
from grpox.observing.alarms import (
    ADVICE,
    Alarms,
    AlarmsState,
    RaisedAlarm,
    alarms_in,
    describe_alarm,
    write_alarms,
)
from grpox.observing.display import TerminalDisplay
from grpox.rollout.collector import Collector
from grpox.rollout.rewards import NamedReward
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.training.step_report import StepReport
from grpox_mlflow.link import tags_of

HEALTHY = {
    "frac_reward_zero_std": 0.9,
    "reward": 0.5,
    "alarms/no_advantage": 0.9,
    "alarms/highest": 1.0,
    "alarms/lowest": 0.0,
    "completions/clipped_ratio": 0.97,
    "grad_norm": 0.3,
    "entropy": 0.006,
    "kl": 2.9,
    "kl_old": 0.1,
    NORM_BEFORE: 2.0,
    CHANGED: 1.0,
    "weights/norm": 9.9,
    SHARE + "exact": 0.998,
    SHARE + "form": 0.002,
    DIFFERS + "exact": 0.5,
    DIFFERS + "form": 0.5,
}
"""Metrics and signals of a step, each just within its threshold."""
FLAT = {"frac_reward_zero_std": 1.0, "alarms/no_advantage": 1.0, "reward": 0.2, "grad_norm": 0.0}
FAULTS: dict[str, tuple[dict[str, float], float]] = {
    "no_variance": (FLAT, 1.0),
    "all_truncated": ({"completions/clipped_ratio": 0.98}, 0.98),
    "no_gradient": ({"grad_norm": 0.0}, 0.0),
    "policy_static": ({CHANGED: 0.0}, 0.0),
    "entropy_gone": ({"entropy": 0.0049}, 0.0049),
    "kl_runaway": ({"kl_old": 3.1}, 3.1),
    "weights_blown_up": ({"weights/norm": 10.2}, 5.1),
    "empty_tests": ({EMPTY_TESTS + "row 7": 4.0}, 4.0),
    "one_reward_decides": ({SHARE + "exact": 0.9995, SHARE + "form": 0.0005}, 0.9995),
}
"""Name of an alarm -> the changes that make a healthy step faulty, and the alarm's value."""
AT_ONCE = {"first_step_mismatch": ({FIRST: 0.07, ALLOWED: 0.0625}, 0.07)}
"""The same of alarms that a single step raises."""


def alarms_after(steps: list[dict[str, float]], **config: Any) -> list[RaisedAlarm]:
    """Return the alarms that steps 1, 2, ... raise; each has the given changes of a healthy step."""
    alarms = Alarms(AlarmsConfig(**config))
    return [alarm for step, changes in enumerate(steps, 1) for alarm in alarms.see(step, HEALTHY | changes)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_raises_its_alarm_alone_after_five_steps_in_a_row_and_once(name: str) -> None:
    fault, value = FAULTS[name]
    is_of_row = name == "empty_tests"  # a row comes once an epoch
    assert is_of_row or alarms_after([fault] * 4 + [{}] + [fault] * 4) == []
    (alarm,) = alarms_after([{}, *[fault] * 20])
    assert (alarm.name, alarm.step) == (name, 2 if is_of_row else 6)
    assert alarm.subject == ("row 7" if is_of_row else alarm.subject)
    assert alarm.value == pytest.approx(value)


def test_a_healthy_run_raises_none_and_a_fault_of_the_first_step_its_alarm_at_once() -> None:
    assert alarms_after([{}] * 50) == []
    fault, value = AT_ONCE["first_step_mismatch"]
    (alarm,) = alarms_after([fault, {}])
    assert (alarm.name, alarm.step, alarm.value) == ("first_step_mismatch", 1, value)
    assert alarms_after([{FIRST: 0.06, ALLOWED: 0.0625}]) == []


def test_every_alarm_has_a_threshold_an_advice_and_a_fault_here_and_is_off_with_null() -> None:
    assert set(AlarmsConfig.model_fields) - {"steps"} == set(ADVICE) == {*FAULTS, *AT_ONCE, "dead_reward"}
    for name, (fault, _) in (FAULTS | AT_ONCE).items():
        off = False if name in ("policy_static", "empty_tests") else None
        assert name not in {alarm.name for alarm in alarms_after([fault] * 9, **{name: off})}


def test_a_step_whose_own_groups_have_equal_rewards_counts_neither_way() -> None:
    """Each batch makes eight steps, and one of its eight groups differs."""
    own = ("frac_reward_zero_std", "alarms/no_advantage", "reward")
    later = {name: value for name, value in HEALTHY.items() if name not in own} | {"grad_norm": 0.0, LIVE: 0.0}
    first = HEALTHY | {"frac_reward_zero_std": 7 / 8, "alarms/no_advantage": 7 / 8, LIVE: 4.0}
    for gradient, expected in ((0.3, []), (0.0, ["no_gradient"])):  # the second one has a fault of its own
        alarms = Alarms(AlarmsConfig())
        batch = [first | {"grad_norm": gradient}, *[later] * 7]
        assert [each.name for step, seen in enumerate(batch * 5) for each in alarms.see(step, seen)] == expected
    # Nor does a step without the value.
    alarms, cut = Alarms(AlarmsConfig(steps=3)), {"completions/clipped_ratio": 1.0}
    counts = [len(alarms.see(step, seen)) for step, seen in enumerate((cut, {}, cut, {}, cut), 1)]
    assert counts == [0, 0, 0, 0, 1]
    # A scaler without any advantage is a fault in each step.
    assert [each.name for each in alarms_after([{"alarms/no_advantage": 1.0, "grad_norm": 0.0, LIVE: 0.0}] * 5)]


def dead_after(count: int, exact: Any, form: Any, first: int = 1, **config: Any) -> list[Any]:
    """Return the dead rewards after steps with these (lowest, highest, number) of the scores of two rewards."""
    alarms, found = Alarms(AlarmsConfig(dead_reward=config)), []
    for step in range(first, first + count):
        ranges = {name: own(step) for name, own in (("exact", exact), ("form", form)) if own(step)}
        raised = alarms.see(step, HEALTHY, ranges)
        alarms.state = AlarmsState.model_validate_json(alarms.state.model_dump_json())
        found += [(each.step, each.subject, each.value) for each in raised]
    return found


def test_a_reward_that_is_constant_beside_a_living_one_is_dead() -> None:
    living, zero, one = (lambda step, own=own: own for own in ((0.0, 1.0, 16), (0.0, 0.0, 16), (1.0, 1.0, 16)))
    assert dead_after(40, living, zero) == [(20, "form", 0.0)]
    assert dead_after(40, one, living) == [(20, "exact", 1.0)]
    assert dead_after(19, living, zero) == dead_after(40, living, living) == dead_after(40, zero, one) == []
    assert dead_after(40, living, lambda step: (float(step == 3), float(step == 3), 16)) == []
    assert dead_after(40, living, lambda step: (0.0, 0.0, 2)) == [(32, "form", 0.0)]
    assert dead_after(40, living, lambda step: (0.0, 0.0, 16) if step % 8 == 1 else None) == [(25, "form", 0.0)]
    assert dead_after(9, living, zero, steps=4, completions=128) == [(8, "form", 0.0)]
    assert dead_after(40, living, zero, first=2) == []
    alarms = Alarms(AlarmsConfig(dead_reward=None))
    assert not any(alarms.see(step, HEALTHY, {"a": (0, 0, 99), "b": (0, 1, 99)}) for step in range(1, 30))


def test_two_rewards_may_be_dead_and_the_report_tells_likely_causes(tmp_path: Path, logged: Any) -> None:
    def exact(completions: Any, answer: Any, **_: Any) -> list[float]: ...

    def plain(completions: Any) -> list[float]: ...

    functions = {"format": plain, "exact": exact, "alive": plain, "unweighed": plain}
    rewards = [NamedReward(name, each, float(name != "unweighed")) for name, each in functions.items()]
    scores = [(0.0, 1.0, float(sample % 2), 0.0) for sample in range(64)]
    texts, columns = ("#### 42", "Think. <think>\n"), {"answer": "forty-two"}
    given = [dict(zip(functions, each, strict=True)) for each in scores]
    rows = [scored(0.0, *texts, rewards=each, columns=columns) for each in given]
    batch: Any = SimpleNamespace(rows=rows, dropped=())
    steps = Steps(tmp_path)
    steps.alarms.config = AlarmsConfig(dead_reward={"steps": 1})  # type: ignore[arg-type]
    refs = [RewardRef(name="format"), *(RewardRef(path=f"mine.py:{name}") for name in [*functions][1:])]
    steps.report.context.config = SimpleNamespace(rewards=refs)  # type: ignore[misc,assignment]
    collector: Any = steps.report.collector
    collector.scorer, collector.signals = SimpleNamespace(rewards=rewards), lambda batch: {}
    collector.ranges = lambda batches: Collector.ranges(collector, batches)
    for step in (1, 2):
        steps.report._raise_alarms(step, [batch], {})
    entries = alarms_in(json.loads((tmp_path / "alarms.json").read_text()))
    facts = [(each["name"], each["step"], each["value"], each["subject"]) for each in entries]
    assert facts == [("dead_reward", 1, 0.0, "format"), ("dead_reward", 1, 1.0, "exact")]
    message = logged()
    assert "likely prompts end with <think>, so no completion has that opening tag" in message
    assert "column 'answer', here 'forty-two', never matches completions, here '#### 42'" in entries[1]["cause"]
    assert len(steps.raised) == 2
    for name in ("format", "exact"):
        assert message.count(f"alarm dead_reward at step 1, value {int(name == 'exact')} of {name}: ") == 1
        assert f"of {name}: " in str(tags_of(tmp_path)["grpox.alarm.dead_reward"])


def test_equal_rewards_are_no_fault_near_the_best_of_a_run_or_where_a_scaler_compares_groups() -> None:
    best = FLAT | {"reward": 0.9, "alarms/lowest": 0.9}
    assert alarms_after([{}, *[best] * 9]) == []
    # The same rewards from the beginning, and equal rewards far from the best, are faults.
    always = best | {"alarms/highest": 0.9}
    assert [alarm.name for alarm in alarms_after([always] * 9)] == ["no_variance"]
    assert [alarm.name for alarm in alarms_after([{}, *[best | {"reward": 0.89}] * 9])] == ["no_variance"]
    assert alarms_after([FLAT | {"alarms/no_advantage": 0.9, "grad_norm": 0.1}] * 9) == []
    # Fewer useless groups than all may be a fault too.
    assert alarms_after([{}] * 5, no_variance=0.91) == []
    (alarm,) = alarms_after([{}] * 5, no_variance=0.9)
    assert (alarm.name, alarm.value) == ("no_variance", 0.9)


def test_a_reward_that_was_learnt_leaves_the_decision_to_another() -> None:
    alone = {SHARE + "exact": 1.0, SHARE + "form": 0.0}
    assert alarms_after([{}, *[alone | {DIFFERS + "form": 0.2}] * 9]) == []
    # One that never differed may be wrong, and one that differs often is drowned.
    for first, differs in ((alone | {DIFFERS + "form": 0.0}, 0.0), ({}, 0.25)):
        (alarm,) = alarms_after([first, *[alone | {DIFFERS + "form": differs}] * 9])
        assert (alarm.name, alarm.subject) == ("one_reward_decides", "exact")


def test_a_restored_state_continues_the_count_and_the_norm_of_the_start() -> None:
    blown = HEALTHY | {"weights/norm": 10.2}
    for saved in range(1, 5):
        before, after = Alarms(AlarmsConfig()), Alarms(AlarmsConfig())
        for step in range(1, saved + 1):
            assert before.see(step, blown) == []
        after.state = AlarmsState.model_validate_json(before.state.model_dump_json())
        # The process that goes on measures the weights of the checkpoint before its first step.
        raised = [after.see(step, blown | {NORM_BEFORE: 10.2}) for step in range(saved + 1, 8)]
        assert [alarm.step for each in raised for alarm in each] == [5]
        assert after.state.raised[0].value == pytest.approx(5.1)


def test_adapters_are_measured_by_their_product_with_what_they_change() -> None:
    """The norm of A and B, of which B is 0 at first, may grow many times in ordinary training."""
    grown = {"weights/norm": 200.0, NORM_BEFORE: 2.0}
    assert alarms_after([grown | {GROWTH: 4.9}] * 9) == []
    (alarm,) = alarms_after([{"weights/norm": 2.0, GROWTH: 5.1}] * 9)
    assert (alarm.name, alarm.step, alarm.value) == ("weights_blown_up", 5, 5.1)
    (alarm,) = alarms_after([{GROWTH: math.inf}] * 9)
    assert alarm.entry()["value"] == "inf"
    (alarm,) = alarms_after([{"kl": math.nan, "kl_old": 0.0}] * 5)  # no number is a fault, and plain JSON
    entry = json.loads(json.dumps(alarm.entry(), allow_nan=False))
    assert entry == {"name": "kl_runaway", "step": 5, "value": "nan"}


def test_alarms_are_off_or_on_with_defaults_and_a_wrong_key_is_refused() -> None:
    def read(alarms: str) -> AlarmsConfig | None:
        return config_of(alarms=yaml.safe_load(alarms)).alarms

    assert [read(text) for text in ("off", "false", "'off'", "null", "OFF")] == [None] * 5
    assert read("on") == read("{}") == AlarmsConfig()
    assert read("{steps: 3, kl_runaway: null}") == AlarmsConfig(steps=3, kl_runaway=None)
    for wrong in ("{kl: 3}", "{steps: 0}", "sometimes"):
        with pytest.raises(ValidationError, match="alarms"):
            read(wrong)


class Steps:
    """Real step reports, with steps of given metrics."""

    def __init__(self, folder: Path) -> None:
        self.alarms, self.times = Alarms(AlarmsConfig(steps=2)), PhaseTimes()
        self.seen: list[Any] = []
        self.raised: list[Any] = []
        observers: Any = SimpleNamespace(
            failures={},
            step_finished=lambda *a: self.seen.append(a[2]),
            alarm_raised=lambda *a: self.raised.append(a[1:]),
        )
        collector: Any = SimpleNamespace(sampler=SimpleNamespace(times=self.times))
        context: Any = SimpleNamespace(output_dir=folder)
        state, warn_once = TrainingState(alarms=self.alarms), WarnOnce(get_logger("grpox.test"))
        self.report = StepReport(context, state, collector, observers, warn_once, True)

    def take(self, step: int, **update: float) -> None:
        with self.times.phase("update"):
            pass
        self.report.step_finished(step, 0.0, [], [], {"grad_norm": 1.0, CHANGED: 3.0, **update}, 1.0)


def test_a_step_report_warns_once_saves_alarms_and_hides_their_measures(tmp_path: Path, logged: Any) -> None:
    steps = Steps(tmp_path)
    for step in range(1, 5):
        steps.take(step, entropy=0.001 if step > 1 else 0.5, grad_norm=0.0 if step > 2 else 1.0)
    told = logged()
    assert told.count("alarm entropy_gone at step 3, value 0.001: ") == told.count("entropy_gone") == 1
    assert told.count("alarm no_gradient at step 4, value 0: ") == told.count("no_gradient") == 1
    assert told.count("docs/troubleshooting.md#alarms") == 2
    assert alarms_in(json.loads((tmp_path / "alarms.json").read_text())) == [
        {"name": "entropy_gone", "step": 3, "value": 0.001},
        {"name": "no_gradient", "step": 4, "value": 0.0},
    ]
    assert steps.raised == [
        (3, {"name": "entropy_gone", "step": 3, "value": 0.001}, None),
        (4, {"name": "no_gradient", "step": 4, "value": 0.0}, None),
    ]
    assert not [name for metrics in steps.seen for name in metrics if name.startswith("alarms/")]


def test_an_alarm_of_before_a_kill_and_one_that_cannot_be_saved(tmp_path: Path, logged: Any) -> None:
    write_alarms(tmp_path, [{"name": "entropy_gone", "step": 2, "value": 0.001}])
    (tmp_path / "file").write_text("")
    steps, nowhere = Steps(tmp_path), Steps(tmp_path / "file")
    for step in (1, 2):
        steps.take(step, entropy=0.001)
    assert "entropy_gone" not in logged()
    assert steps.raised == []
    assert [alarm.step for alarm in steps.alarms.state.raised] == [2]
    for step in (1, 2):
        nowhere.take(step, entropy=0.001)
    told = logged()
    assert "alarms are not saved" in told
    assert "alarm entropy_gone at step 2" in told


def test_terminal_report_and_mlflow_show_alarms_as_the_summary_has_them(tmp_path: Path) -> None:
    alarm = {"name": "kl_runaway", "step": 7, "value": 9.25}
    console = Console(record=True, width=200, file=io.StringIO())
    display = TerminalDisplay(console)
    run: Any = SimpleNamespace(output_dir=tmp_path, started=None)
    display.grpox_run_finished(run, {"alarms": [alarm]})
    assert "kl_runaway at step 7, value 9.25" in console.export_text()
    line = {"step": 7, "time": 1.0, "metrics": {"reward": 0.5}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    def alarms() -> tuple[list[str], list[str]]:
        tags = [text for tag, text in tags_of(tmp_path).items() if tag == "grpox.alarm.kl_runaway"]
        return [each["text"] for each in answers_of(tmp_path)["run"]["alarms"]], tags

    assert alarms() == ([], [])
    write_alarms(tmp_path, [alarm])
    display.grpox_run_failed(run)
    assert "alarm kl_runaway at step 7, value 9.25" in console.export_text()
    assert alarms() == ([describe_alarm(alarm)], [describe_alarm(alarm)])
    assert "raise train.beta" in describe_alarm(alarm)
    # A run that was resumed with changes may not have the alarm any more.
    for told in ([], [alarm]):
        (tmp_path / "summary.json").write_text(json.dumps({"steps": 7, "alarms": told}))
        assert alarms() == ([describe_alarm(each) for each in told],) * 2
