"""A run whose MLflow server comes late, is killed and started again, and that is itself killed and resumed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.killing import OF_THIS_MACHINE, kill, start, wait_for_steps
from support.mlflow_serving import Server, Value, history, recorded_values

GrpoxCommand = Callable[..., subprocess.CompletedProcess[str]]
SETTINGS = (
    "quickstart",
    "train.max_steps=12",
    "train.per_device_train_batch_size=32",
    "checkpoint.every=3",
    "evaluation.every=4",
    "output_dir=runs/followed",
    # What follows compares MLflow with metrics.jsonl.
    "logging.system_metrics_every=0",
    # It holds the run where the test wants it, however slow this machine is.
    "rewards=[{path: 'hold.py:held', timeout: 600}]",
    "evaluation.accuracy=held",
)
HOLD = """
import time
from pathlib import Path


def held(completions, **_):
    while Path("hold").exists():
        time.sleep(0.05)
    return [float(len(completion)) for completion in completions]
"""


@pytest.mark.slow
def test_a_server_that_comes_and_goes_has_every_value_once(folder: Path, grpox: GrpoxCommand) -> None:
    (folder / "hold.py").write_text(HOLD)
    run, hold, server = folder / "runs" / "followed", folder / "hold", Server(folder / "server")
    settings = (*SETTINGS, f"tracking.mlflow.tracking_uri={server.uri}")
    try:
        process = start(folder, *settings)
        assert wait_for_steps(process, run, 2), process.communicate()[1]  # with no server at all
        hold.touch()
        server.start()
        hold.unlink()
        until(lambda: server.runs() and len(server.client.get_metric_history(_id(server), "loss")) >= 4)
        hold.touch()
        server.kill()
        kill(process)

        hold.unlink()
        process = start(folder, *settings, "--resume", "auto")
        assert wait_for_steps(process, run, 6), process.communicate()[1]
        hold.touch()
        server.start()
        until(lambda: len(server.client.get_metric_history(_id(server), "loss")) >= 6)
        hold.unlink()
        stderr = process.communicate()[1]
        assert process.returncode == 0, stderr

        synced = grpox("sync", str(run))  # on a slow machine the run's end may not have waited long enough
        assert (synced.returncode, synced.stderr) == (0, "")
        [stored] = server.runs()
        assert stored.info.status == "FINISHED"
        there = history(server.client, stored)
        assert_every_value_once(there, run)
        synced = grpox("sync", str(run))
        assert "(FINISHED): 0 values and 0 completion files written" in synced.stdout
        assert history(server.client, stored) == there
    finally:
        server.kill()


def assert_every_value_once(there: dict[Value, int], run: Path) -> None:
    """A step that was done twice has in MLflow the times and durations of the first, and all else the same."""
    recorded, undone = recorded_values(run), recorded_values(run, "metrics.undone.jsonl")
    steps = [(name, step) for name, step, *_ in there]
    assert set(there.values()) == {1}
    assert len(steps) == len(set(steps))
    assert {(name, step) for name, step, *_ in recorded} <= set(steps)
    assert there.keys() <= recorded.keys() | undone.keys()
    assert {(name, step, value) for name, step, _, value in there if not name.startswith(OF_THIS_MACHINE)} == {
        (name, step, value) for name, step, _, value in recorded if not name.startswith(OF_THIS_MACHINE)
    }


def until(true: Callable[[], object], seconds: float = 300) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _id(server: Server) -> str:
    return str(server.runs()[0].info.run_id)
