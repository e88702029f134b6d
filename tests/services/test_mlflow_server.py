"""The tracker against a real MLflow server: what arrives, and what happens when the server goes away."""

from __future__ import annotations

import io
import json
import math
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from support.mlflow_serving import Server, history, recorded_values
from rich.console import Console
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import RunFailed
from grpox.observing.record import LocalRecord
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.sync import sync
from grpox_mlflow.tracker import MlflowTracker

ROLLOUTS = [ScoredRollout(Rollout(0, 0, (1,), (2, 3), "stop", 0), "1+1=", "2", {"math": 1.0}, 1.0, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"], "loss": "grpo"}
    )
    return RunContext(config, tmp_path / "run", 10, 1, {"grpox": "0.1.0"}, None, "run.yaml")


@pytest.mark.slow
def test_a_run_reaches_the_server_and_a_server_gone_costs_no_step(
    run: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tmp_path / "server") as server:
        _a_finished_run_is_there(run, server.uri)
        _it_is_read_back(run, server.uri)
        _a_killed_run_is_marked(run, server.uri)
        _steps_go_on_without_an_answer(run, server, monkeypatch)


def _a_finished_run_is_there(run: RunContext, uri: str) -> None:
    output = io.StringIO()
    tracker, record = (
        MlflowTracker(MlflowConfig(tracking_uri=uri), Console(file=output, width=200)),
        LocalRecord(),
    )
    record.grpox_run_started(run)
    tracker.grpox_run_started(run)
    record.grpox_rollouts_scored(1, ROLLOUTS)
    tracker.grpox_rollouts_scored(1, ROLLOUTS)
    for step in (1, 2, 3):
        record.grpox_step_finished(step, {"loss": 1 / 3 * step, "kl": math.nan})
        tracker.grpox_step_finished({})
    (run.output_dir / "summary.json").write_text("{}")
    tracker.grpox_run_finished()

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


def _it_is_read_back(run: RunContext, uri: str) -> None:
    """By `grpox runs`, which finds the server by the run's folder."""

    def told(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["runs", *arguments])
        assert result.exception is None, result.exception
        return result.stdout

    (listed,) = json.loads(told("list", "--uri", uri, "--json"))
    shown = json.loads(told("show", str(run.output_dir), "--json"))
    assert (listed["status"], listed["steps"], listed["total_steps"]) == ("FINISHED", 3, 10)
    assert shown["run_id"] == listed["run_id"]
    assert shown["params"]["loss.name"] == "grpo"
    assert shown["metrics"]["kl"]["last"] == {"step": 3, "value": "nan"}
    assert shown["artifacts"] == {
        "completions": 1, "config.yaml": None, "eval_table.json": None, "summary.json": None,
    }  # fmt: skip
    page = told("open", str(run.output_dir), "--no-browser").splitlines()[0]
    assert page.startswith(f"run:    {uri}/#/experiments/")
    assert page.endswith(f"/runs/{shown['run_id']}")


def _a_killed_run_is_marked(run: RunContext, uri: str) -> None:
    tracker = MlflowTracker(MlflowConfig(tracking_uri=uri, run_name="interrupted"))
    tracker.grpox_run_started(run)
    tracker.grpox_run_failed(KeyboardInterrupt())
    stored = _latest(MlflowClient(uri))
    assert (stored.info.run_name, stored.info.status) == ("interrupted", "KILLED")


def _steps_go_on_without_an_answer(run: RunContext, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 2.0)
    tracker, record = MlflowTracker(MlflowConfig(tracking_uri=server.uri)), LocalRecord()
    record.grpox_run_started(run)
    tracker.grpox_run_started(run)
    server.stop()
    for step in range(1, 51):
        record.grpox_step_finished(step, {"loss": 1.0 / step})
        begun = time.monotonic()
        tracker.grpox_step_finished({})
        assert time.monotonic() - begun < 1
    begun = time.monotonic()
    with pytest.raises(RunFailed, match=f"grpox sync {run.output_dir}"):
        tracker.grpox_run_finished()
    assert time.monotonic() - begun < 10
    (run.output_dir / "summary.json").write_text("{}")
    server.go_on()
    assert sync(run.output_dir).status == "FINISHED"
    stored = _latest(server.client)
    assert history(server.client, stored) == recorded_values(run.output_dir)
    assert (len(server.runs()), stored.info.status) == (3, "FINISHED")


def _latest(client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name("grpox")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id])[0]


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_delays_the_start_by_seconds(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        tracker = MlflowTracker(MlflowConfig(tracking_uri=uri))
        begun = time.monotonic()
        tracker.grpox_run_started(run)
        with pytest.raises(RunFailed, match="nothing is lost: grpox sync"):
            tracker.grpox_run_finished()
        assert time.monotonic() - begun < 15
