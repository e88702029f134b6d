"""The tracker against a real MLflow server: what arrives there, and a server that never answers."""

from __future__ import annotations

import math
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.logs import LOGGED
from support.mlflow_store import TrackedRun
from support.patience import patient
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import RunFailed
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.store import PROBE_SECONDS
from grpox_mlflow.tracker import MlflowTracker

if TYPE_CHECKING:
    from support.mlflow_serving import Server


ROLLOUTS = [ScoredRollout(Rollout(0, 0, (1,), (2, 3), "stop", 0), "1+1=", "2", {"math": 1.0}, 1.0, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"], "loss": "grpo"}
    )
    return RunContext(config, tmp_path / "run", 10, 1, {"grpox": "0.1.0"}, None, "run.yaml")


def test_a_run_reaches_the_server(
    run: RunContext, mlflow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", patient(60))
    tracked = TrackedRun(run, mlflow_server.uri, experiment="tracker").start()
    tracked.score(1, ROLLOUTS)
    for step in (1, 2, 3):
        tracked.step(step, {"loss": 1 / 3 * step, "kl": math.nan})
    tracked.finish()
    info = tracked.stored.info
    assert info.status == "FINISHED"
    assert tracked.values("loss") == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]
    assert all(math.isnan(value) for _, value in tracked.values("kl"))
    path = "completions/step_000001.parquet"
    assert tracked.artifact(path).read_bytes() == (run.output_dir / path).read_bytes()
    page = f"{mlflow_server.uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    assert page in LOGGED.getvalue()
    opened = CliRunner().invoke(app, ["runs", "open", str(run.output_dir), "--no-browser"])
    assert opened.stdout.splitlines()[0] == f"run:    {page}"


def test_a_server_that_accepts_and_never_answers_delays_the_start_by_seconds(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing_seconds = 0.5
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", closing_seconds)
    # As MLflow would be told to wait for hours and to try again: the run must come back all the same.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100000")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "8")
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        tracker = MlflowTracker(MlflowConfig(tracking_uri=uri))
        tracker.grpox_run_started(run)
        with pytest.raises(RunFailed, match="nothing is lost: grpox sync"):
            tracker.grpox_run_finished()
        requests = _accepted(mute)
    # Each waits so many seconds for an answer; then comes what the end waits.
    assert requests >= 1
    assert requests * PROBE_SECONDS + closing_seconds < 15


def _accepted(server: socket.socket) -> int:
    """Count the connections that clients have made to it."""
    server.setblocking(False)
    count = 0
    while True:
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return count
        connection.close()
        count += 1
