"""The tracker against a real MLflow server: what arrives there, and a server that never answers."""

from __future__ import annotations

import json
import math
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.logs import LOGGED
from support.patience import patient
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import RunFailed
from grpox.observing.record import LocalRecord
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.store import PROBE_SECONDS
from grpox_mlflow.tracker import MlflowTracker

if TYPE_CHECKING:
    from support.mlflow_serving import Server


EXPERIMENT = "tracker"
ROLLOUTS = [ScoredRollout(Rollout(0, 0, (1,), (2, 3), "stop", 0), "1+1=", "2", {"math": 1.0}, 1.0, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"], "loss": "grpo"}
    )
    return RunContext(config, tmp_path / "run", 10, 1, {"grpox": "0.1.0"}, None, "run.yaml")


def test_a_run_reaches_the_server(
    run: RunContext, mlflow_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", patient(60))
    _a_finished_run_is_there(run, mlflow_server, tmp_path)
    _it_is_opened(run, mlflow_server.uri)
    _a_killed_run_is_marked(run, mlflow_server)


def _a_finished_run_is_there(run: RunContext, server: Server, folder: Path) -> None:
    output = LOGGED
    config = MlflowConfig(tracking_uri=server.uri, experiment=EXPERIMENT)
    tracker, record = MlflowTracker(config), LocalRecord(MlflowTracker.files)
    record.grpox_run_started(run)
    tracker.grpox_run_started(run)
    record.grpox_rollouts_scored(1, ROLLOUTS)
    tracker.grpox_rollouts_scored(1, ROLLOUTS)
    for step in (1, 2, 3):
        record.grpox_step_finished(step, {"loss": 1 / 3 * step, "kl": math.nan})
        tracker.grpox_step_finished({})
    (run.output_dir / "summary.json").write_text("{}")
    tracker.grpox_run_finished()

    client = server.client
    [stored] = server.runs(EXPERIMENT)
    run_id = stored.info.run_id
    assert stored.info.status == "FINISHED"
    assert stored.data.params["loss.name"] == "grpo"
    history = client.get_metric_history(run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]
    assert all(math.isnan(metric.value) for metric in client.get_metric_history(run_id, "kl"))
    (folder / "fetched").mkdir()
    for path in ("config.yaml", "completions/step_000001.parquet", "summary.json"):
        fetched = Path(client.download_artifacts(run_id, path, str(folder / "fetched")))
        assert fetched.read_bytes() == (run.output_dir / path).read_bytes()
    assert f"{server.uri}/#/experiments/{stored.info.experiment_id}/runs/{run_id}" in output.getvalue()


def _it_is_opened(run: RunContext, uri: str) -> None:
    """By `grpox runs open`, which finds the server by the run's folder."""
    result = CliRunner().invoke(app, ["runs", "open", str(run.output_dir), "--no-browser"])
    assert result.exception is None, result.exception
    run_id = json.loads((run.output_dir / "mlflow.json").read_text())["run_id"]
    page = result.stdout.splitlines()[0]
    assert page.startswith(f"run:    {uri}/#/experiments/")
    assert page.endswith(f"/runs/{run_id}")


def _a_killed_run_is_marked(run: RunContext, server: Server) -> None:
    config = MlflowConfig(tracking_uri=server.uri, experiment=EXPERIMENT, run_name="interrupted")
    tracker = MlflowTracker(config)
    tracker.grpox_run_started(run)
    tracker.grpox_run_failed(KeyboardInterrupt())
    stored = server.runs(EXPERIMENT)[0]
    assert (stored.info.run_name, stored.info.status) == ("interrupted", "KILLED")


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
