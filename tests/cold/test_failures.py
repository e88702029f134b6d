"""End of a failing run: exit code, message, and the state of its MLflow run."""

import signal
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support import processes
from support.killing import wait_for_steps

SHORT = ("train.max_steps=2", "evaluation=null")


def statuses(folder):
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    return {run.info.run_name: run.info.status for run in client.search_runs(experiments)}


def test_a_reward_that_raises_is_named_and_fails_the_run(grpox, folder):
    (folder / "mine.py").write_text("def broken(completions, **kwargs):\n    return [1 / 0]\n")
    override = "rewards=[{path: mine.py:broken}]"
    done = grpox("train", "quickstart", *SHORT, override, "tracking.mlflow.run_name=raises")
    assert done.returncode == 1
    assert "reward 'broken' raised ZeroDivisionError" in done.stderr
    assert "mine.py:2" in done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(folder)["raises"] == "FAILED"


@pytest.mark.parametrize(
    ("signal_sent", "code", "name"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_ends_the_run_as_killed(folder, signal_sent, code, name):
    command = [Path(sys.executable).with_name("grpox"), "train", "quickstart"]  # itself a script of Python's
    command += [f"tracking.mlflow.run_name={name}", f"output_dir=runs/{name}", "evaluation=null"]
    process = processes.start(*command, cwd=folder, cold=True)
    assert wait_for_steps(process, folder / "runs" / name, 1), process.output()[1]
    process.send_signal(signal_sent)
    _, stderr = process.communicate()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert statuses(folder)[name] == "KILLED"


STRIKES = """
import os
from grpox import hookimpl

class Strike:
    @hookimpl
    def {hook}(self):
        os.kill(os.getpid(), 15)
        for _ in range(1000):  # the handler runs between two instructions of this loop
            pass
"""


@pytest.mark.parametrize("hook", ["grpox_checkpoint_saved", "grpox_run_finished"])
def test_sigterm_after_training_ends_with_143_and_leaves_no_run_open(grpox, folder, hook):
    (folder / f"{hook}.py").write_text(STRIKES.format(hook=hook))
    # Listed last and so told first: the tracker hears of the end after the signal.
    tracking = f"tracking={{mlflow: {{run_name: {hook}}}, strike: {{path: '{hook}.py:Strike'}}}}"
    settings = (tracking, "checkpoint.last=false", f"output_dir=runs/{hook}")
    done = grpox("train", "quickstart", *SHORT, *settings)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(folder)[hook] == "FINISHED"
    assert (folder / "runs" / hook / "model" / "config.json").exists()
