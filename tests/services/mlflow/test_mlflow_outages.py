"""An MLflow server that comes late, is killed, comes back or stands still: every value is there once."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.killing import OF_THIS_MACHINE, kill, start, wait_for_steps
from support.mlflow_serving import Server, Value, history, recorded_values
from support.mlflow_store import TrackedRun
from support.patience import patient
from support.services import wait_until

from grpox.config import RunConfig
from grpox.contracts import RunContext
from grpox.errors import RunFailed
from grpox_mlflow.sync import sync
from grpox_mlflow.tracker import Writer

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


def test_a_server_that_comes_and_goes_has_every_value_once(
    server: Server, folder: Path, grpox: GrpoxCommand
) -> None:
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
    assert_every_value_once(there, run)
    synced = grpox("sync", str(run))
    assert "(FINISHED): 0 values and 0 completion files written" in synced.stdout
    assert history(server.client, stored) == there


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


def _values_there(server: Server) -> int:
    runs = server.runs("followed")
    return len(server.client.get_metric_history(runs[0].info.run_id, "loss")) if runs else 0


class Requests:
    """The threads that ask MLflow's server, and the seconds that writers are given for their last writing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import requests

        self.threads: list[str] = []
        self.closing_seconds: list[float] = []
        send, close = requests.Session.send, Writer.close

        def seen_send(session: Any, *arguments: Any, **options: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            return send(session, *arguments, **options)

        def seen_close(writer: Writer, seconds: float, progress: Callable[[], None]) -> bool:
            self.closing_seconds.append(seconds)
            return close(writer, seconds, progress)

        monkeypatch.setattr(requests.Session, "send", seen_send)
        monkeypatch.setattr(Writer, "close", seen_close)


def test_steps_go_on_while_a_server_stands_still(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.is_healthy():  # where this test is run alone
        server.start()
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 2.0)
    settings = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"], "loss": "grpo"}
    config, versions = RunConfig.model_validate(settings), {"grpox": "0.1.0"}
    run = RunContext(config, tmp_path / "run", 10, 1, versions, None, "run.yaml")
    tracked = TrackedRun(run, server.uri, experiment="steps").start()
    server.stop()
    # A tracker that waited for the server would be found out by this, in place of waiting for ever.
    rescue = threading.Timer(patient(120), server.go_on)
    rescue.start()
    try:
        requests = Requests(monkeypatch)
        for step in range(1, 51):
            tracked.step(step, {"loss": 1.0 / step})
            if step == 1:
                wait_until(lambda: "mlflow-writer" in requests.threads, "the first step is being written", 60)
        assert set(requests.threads) == {"mlflow-writer"}  # the steps' own thread asks the server nothing
        with pytest.raises(RunFailed, match=f"grpox sync {run.output_dir}"):
            tracked.finish()
        [waited] = requests.closing_seconds
        assert waited < 10
        assert set(requests.threads) == {"mlflow-writer"}
        assert rescue.is_alive()
    finally:
        rescue.cancel()
        server.go_on()
    assert sync(run.output_dir).status == "FINISHED"
    [stored] = server.runs("steps")
    assert history(server.client, stored) == recorded_values(run.output_dir)
    assert stored.info.status == "FINISHED"
