"""An MLflow server that comes late, is killed and comes back: every value is there once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support.killing import OF_THIS_MACHINE, kill, start, wait_for_steps
from support.mlflow_serving import Server, Value, history, recorded_values
from support.services import wait_until

GrpoxCommand = Callable[..., subprocess.CompletedProcess[str]]
SETTINGS = (
    "quickstart",
    "train.max_steps=12",
    "train.per_device_train_batch_size=32",
    "checkpoint.every=3",
    "evaluation.every=4",
    "output_dir=runs/followed",
    "tracking.mlflow.experiment=followed",
    # What follows compares MLflow with metrics.jsonl.
    "logging.system_metrics_every=0",
    # It holds the run where the test wants it, however slow this machine is.
    "rewards=[{path: 'hold.py:held', timeout: 7200}]",
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has not been started."""
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.kill()


def test_a_server_may_come_and_go(server: Server, folder: Path, grpox: GrpoxCommand) -> None:
    (folder / "hold.py").write_text(HOLD)
    run, hold = folder / "runs" / "followed", folder / "hold"
    settings = (*SETTINGS, f"tracking.mlflow.tracking_uri={server.uri}")
    process = start(folder, *settings)
    try:
        assert wait_for_steps(process, run, 2), process.communicate()[1]  # with no server at all
        hold.touch()
        server.start()
        hold.unlink()
        wait_until(lambda: _values_there(server) >= 4, "four values are there", 300)
        hold.touch()
        server.kill()
        kill(process)

        hold.unlink()
        process = start(folder, *settings, "--resume", "auto")
        assert wait_for_steps(process, run, 6), process.communicate()[1]
        hold.touch()
        server.start()
        wait_until(lambda: _values_there(server) >= 6, "six values are there", 300, process)
        hold.unlink()
        stderr = process.communicate()[1]
        assert process.returncode == 0, stderr
    finally:
        kill(process)

    synced = grpox("sync", str(run))  # on a slow machine the run's end may not have waited long enough
    assert (synced.returncode, synced.stderr) == (0, "")
    [stored] = server.runs("followed")
    assert stored.info.status == "FINISHED"
    there = history(server.client, stored)
    # A step that was done twice has in MLflow the times and durations of the first, and all else the same.
    recorded, undone = recorded_values(run), recorded_values(run, "metrics.undone.jsonl")
    steps = [(name, step) for name, step, *_ in there]
    assert set(there.values()) == {1}
    assert len(steps) == len(set(steps))
    assert {(name, step) for name, step, *_ in recorded} <= set(steps)
    assert there.keys() <= recorded.keys() | undone.keys()
    assert lasting(there) == lasting(recorded)
    synced = grpox("sync", str(run))
    assert "(FINISHED): 0 values and 0 completion files written" in synced.stdout
    assert history(server.client, stored) == there


def lasting(values: Iterable[Value]) -> set[tuple[str, int, float | str]]:
    """Leave out times and durations."""
    return {(name, step, value) for name, step, _, value in values if not name.startswith(OF_THIS_MACHINE)}


def _values_there(server: Server) -> int:
    runs = server.runs("followed")
    return len(server.client.get_metric_history(runs[0].info.run_id, "loss")) if runs else 0
