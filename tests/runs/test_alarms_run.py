"""Real runs with a fault raise its alarm; a resumed run has the alarms of the run that was not killed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support.fixtures import GrpoxCommand
from support.processes import run
from support.run_files import metrics_of, summary_of

REWARDS = """
def constant(completions, **columns):
    return [1.0] * len(completions)


def varied(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def tiny(completions, **columns):
    return [1e-3 * (sum(map(ord, text)) % 5) for text in completions]
"""
SCRIPT = """
from grpox import train

COMMON = ["evaluation=null", "train.max_steps=4", "train.per_device_train_batch_size=32"]
COMMON += ["train.num_generations=8", "train.warmup_steps=0", "tracking={}", "checkpoint.every=0"]
CONSTANT, VARIED = "rewards=[{path: own.py:constant}]", "rewards=[{path: own.py:varied}]"
TWO_STEPS = "alarms.steps=2"
TESTS = "rewards=[{path: own.py:varied}, {name: code, column: about.tests}]"
TWO = "rewards=[{path: own.py:varied, weight: 100}, {path: own.py:tiny}]"
RUNS = {
    "flat": [CONSTANT, TWO_STEPS],
    "off": [CONSTANT, "alarms=off"],
    "cut": [VARIED, "sampling.max_completion_length=1", "train.mask_truncated_completions=true", TWO_STEPS],
    "static": [TWO, "train.learning_rate=1e-30", TWO_STEPS],
    "empty": ["data.path=empty.jsonl", TESTS],
    "blown": [VARIED, "train.learning_rate=1", "train.beta=0.04", TWO_STEPS],
}


class Stops:
    def grpox_alarm_raised(self, step, alarm, control):
        control.stop(f"{alarm['name']} at step {step}")


for name, own in RUNS.items():
    callbacks = [Stops()] if name == "cut" else []
    train("quickstart", [*COMMON, *own, f"output_dir=runs/{name}"], callbacks=callbacks)
"""
EXPECTED = {
    "flat": {"no_variance"},
    "cut": {"all_truncated", "no_gradient"},
    "static": {"policy_static", "one_reward_decides"},
    "empty": {"empty_tests"},
    "blown": {"weights_blown_up", "kl_runaway", "entropy_gone"},
}


@pytest.fixture(scope="module")
def faulty(folder: Path) -> tuple[Path, str]:
    """The folder of the faulty runs, one after the other in one process, and their messages."""
    (folder / "own.py").write_text(REWARDS)
    (folder / "script.py").write_text(SCRIPT)
    rows = [
        {"prompt": f"{n}+12=", "about": {"tests": "2" if n == 11 else "assert False"}} for n in range(10, 14)
    ]
    (folder / "empty.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("script.py", cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs", done.stderr + done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_with_a_fault_raises_its_alarms(faulty: tuple[Path, str], name: str) -> None:
    runs, told = faulty
    alarms = {alarm["name"]: alarm for alarm in summary_of(runs / name)["alarms"]}
    # A policy of blown up weights also says the same to every prompt.
    beside = {"no_variance", "all_truncated"} if name == "blown" else set()
    assert EXPECTED[name] <= alarms.keys() <= EXPECTED[name] | beside
    if name == "cut":  # its callback ends it; the first alarm is the reason
        assert summary_of(runs / name)["stopped_early"] == {"step": 2, "reason": "all_truncated at step 2"}
    if name == "empty":
        assert alarms["empty_tests"]["subject"] == "row 1 (from 0) of the data"
        assert "reward 'code': row 1 (from 0) of the data has tests that ask nothing" in told
    page = (runs / name / "report.html").read_text()
    # Two of the runs may raise one alarm at the same step.
    raised = Counter(
        (alarm["name"], alarm["step"])
        for run in (*EXPECTED, "off")
        for alarm in summary_of(runs / run).get("alarms", ())
    )
    for alarm in EXPECTED[name]:
        step = alarms[alarm]["step"]
        assert told.count(f"alarm {alarm} at step {step},") == raised[alarm, step]
        assert f"{alarm} at step {alarms[alarm]['step']}" in page


def test_alarms_off_leave_no_trace_and_change_nothing(faulty: tuple[Path, str]) -> None:
    runs, _ = faulty
    assert "alarms" not in summary_of(runs / "off")
    assert not (runs / "off" / "alarms.json").exists()
    off, flat = ([step["loss"] for step in metrics_of(runs / name)] for name in ("off", "flat"))
    assert off == flat


def test_a_resumed_run_counts_on_and_does_not_repeat_what_was_told(grpox: GrpoxCommand, folder: Path) -> None:
    (folder / "own.py").write_text(REWARDS)
    run_dir = folder / "runs" / "resumed"
    settings = (
        *("evaluation=null", "rewards=[{path: own.py:constant}]", "train.max_steps=4", "alarms.steps=3"),
        *("train.per_device_train_batch_size=16", "checkpoint.every=2", f"output_dir={run_dir}"),
    )
    done = grpox("train", "quickstart", *settings)
    assert done.returncode == 0, done.stderr
    alarm = {"name": "no_variance", "step": 3, "value": 1.0}
    assert summary_of(run_dir)["alarms"] == [alarm]
    assert done.stderr.count("no_variance at step 3") == 1
    assert "no_variance at step 3" in done.stdout[done.stdout.index("run complete") :]
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    tracked = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    assert client.get_run(tracked).data.tags["grpox.alarm.no_variance"].startswith("no_variance at step 3")

    # As if it had been killed after the alarm was reported, before the next checkpoint.
    shutil.rmtree(run_dir / "checkpoints" / "step-00000004")
    (run_dir / "summary.json").unlink()
    done = grpox("train", "--resume", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert "no_variance at step 3" not in done.stderr
    assert summary_of(run_dir)["alarms"] == [alarm]
