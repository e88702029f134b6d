"""The tracker against a real MLflow server: what arrives, and what happens when the server goes away."""

from __future__ import annotations

import io
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from rich.console import Console

from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import RunFailed
from grpox.observing.record import LocalRecord
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.tracker import MlflowTracker

ROLLOUTS = [ScoredRollout(Rollout(0, 0, (1,), (2, 3), "stop", 0), "1+1=", "2", {"math": 1.0}, 1.0, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"], "loss": "grpo"}
    )
    return RunContext(config, tmp_path / "run", 10, 1, {"grpox": "0.1.0"}, None, "run.yaml")


@contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server in a process group of its own, on a free port of this machine."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--workers", "1",
        "--host", "127.0.0.1", "--port", str(port),
        "--backend-store-uri", f"sqlite:///{folder}/server.db",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}", server
    finally:
        _kill(server)


def _wait_until_up(uri: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not come up:\n{log.read_text()}")


def _kill(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(10)


@pytest.mark.slow
def test_a_run_reaches_the_server_and_a_server_gone_costs_no_step(
    run: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow_server(tmp_path) as (uri, server):
        _a_finished_run_is_there(run, uri)
        _a_killed_run_is_marked(run, uri)
        _steps_go_on_without_the_server(run, uri, server, monkeypatch)


def _a_finished_run_is_there(run: RunContext, uri: str) -> None:
    output = io.StringIO()
    tracker, record = (
        MlflowTracker(MlflowConfig(tracking_uri=uri), Console(file=output, width=200)),
        LocalRecord(),
    )
    record.grpox_run_started(run)
    tracker.grpox_run_started(run)
    record.grpox_rollouts_scored(1, ROLLOUTS)
    tracker.grpox_rollouts_scored(1)
    for step in (1, 2, 3):
        tracker.grpox_step_finished(step, {"loss": 1 / 3 * step, "kl": math.nan})
    (run.output_dir / "summary.json").write_text("{}")
    tracker.grpox_run_finished(run)

    client = MlflowClient(uri)
    stored = _latest(client)
    run_id = stored.info.run_id
    assert stored.info.status == "FINISHED"
    assert stored.data.params["loss.name"] == "grpo"
    history = client.get_metric_history(run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]
    assert all(math.isnan(metric.value) for metric in client.get_metric_history(run_id, "kl"))
    for path in ("config.yaml", "completions/step_000001.parquet", "summary.json"):
        fetched = Path(client.download_artifacts(run_id, path))
        assert fetched.read_bytes() == (run.output_dir / path).read_bytes()
    assert f"{uri}/#/experiments/{stored.info.experiment_id}/runs/{run_id}" in output.getvalue()


def _a_killed_run_is_marked(run: RunContext, uri: str) -> None:
    tracker = MlflowTracker(MlflowConfig(tracking_uri=uri, run_name="interrupted"))
    tracker.grpox_run_started(run)
    tracker.grpox_run_failed(KeyboardInterrupt())
    stored = _latest(MlflowClient(uri))
    assert (stored.info.run_name, stored.info.status) == ("interrupted", "KILLED")


def _steps_go_on_without_the_server(
    run: RunContext, uri: str, server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 2.0)
    tracker = MlflowTracker(MlflowConfig(tracking_uri=uri))
    tracker.grpox_run_started(run)
    _kill(server)
    begun = time.monotonic()
    for step in range(1, 51):
        tracker.grpox_step_finished(step, {"loss": 1.0})
    assert time.monotonic() - begun < 1
    begun = time.monotonic()
    with pytest.raises(RunFailed, match="MLflow"):
        tracker.grpox_run_finished(run)
    assert time.monotonic() - begun < 10


def _latest(client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name("grpox")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id])[0]


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_ends_the_run_in_ten_seconds(run: RunContext) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        tracker = MlflowTracker(MlflowConfig(tracking_uri=uri))
        begun = time.monotonic()
        with pytest.raises(RunFailed, match="train without MLflow"):
            tracker.grpox_run_started(run)
        assert time.monotonic() - begun < 10
