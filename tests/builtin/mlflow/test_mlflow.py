"""MLflow holds what the run told it, value for value, in a real SQLite store, or says that it does not."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from pydantic import ValidationError
from support import processes
from support.contexts import context_of, scored
from support.logs import LOGGED
from support.mlflow_store import TrackedRun
from support.patience import patient

from grpox.config import ComponentRef
from grpox.contracts import RunContext
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.run_lock import hold
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.naming import NAME_LENGTH, VALUE_LENGTH, MlflowNames, flattened, shortened
from grpox_mlflow.parent import NAMED
from grpox_mlflow.store import PROBE_SECONDS, addresses, resolved_uri
from grpox_mlflow.sync import sync
from grpox_mlflow.tracker import MlflowTracker, Writer

ROLLOUTS = [scored()]


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    sections: dict[str, Any] = {
        "model": {"path": "m", "chat_template_kwargs": {"long": "x" * 7000, "odd key!": 1}},
        "rewards": ["math", {"path": "rewards.py:short", "weight": 0.5}],
        "loss": {"name": "dapo", "clip_high": 0.28},
    }
    versions = {"grpox": "0.1.0", "torch": "2.13.0"}
    run = context_of(tmp_path / "run", world_size=2, **sections)
    return replace(run, versions=versions, git_commit="abc123", started=time.time() - 40)


def test_a_finished_run_reads_back_value_for_value(run: RunContext, store: str) -> None:
    session = TrackedRun(run, store, run_name="first", tags={"team": "maths"}).start()
    before = time.time_ns() // 1_000_000
    session.score(1, ROLLOUTS)
    for step in (1, 2):
        session.step(step, {"loss": 0.1 + step, "rewards/math/mean": 1 / 3})
    session.evaluate(2, {"accuracy": 0.25})
    checkpoint = run.output_dir / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text("{}")
    session.tracker.grpox_checkpoint_saved()
    session.finish()

    stored = session.stored
    assert stored.info.status == "FINISHED"
    assert stored.info.run_name == "first"
    assert session.values("loss") == [(1, 1.1), (2, 2.1)]
    assert session.values("rewards/math/mean") == [(1, 1 / 3), (2, 1 / 3)]
    assert session.values("evaluation/accuracy") == [(2, 0.25)]
    written = session.client.get_metric_history(stored.info.run_id, "loss")[0].timestamp
    assert before <= written <= time.time_ns() // 1_000_000
    assert stored.data.params["loss.clip_high"] == "0.28"
    assert stored.data.params["rewards.1.path"] == "rewards.py:short"
    assert stored.data.params["run.world_size"] == "2"
    assert stored.data.params["model.chat_template_kwargs.odd key_"] == "1"
    long = stored.data.params["model.chat_template_kwargs.long"]
    assert long.endswith("(7000 characters, whole in config.yaml)")
    expected = {
        "team": "maths", "grpox.version": "0.1.0", "version.torch": "2.13.0", "grpox.git.commit": "abc123",
        "mlflow.source.git.commit": "abc123", "mlflow.source.name": "run.yaml",
        "grpox.checkpoint": str(checkpoint),
    }  # fmt: skip
    assert expected.items() <= stored.data.tags.items()
    for path in ("config.yaml", "completions/step_000001.parquet"):
        assert session.artifact(path).read_bytes() == (run.output_dir / path).read_bytes()
    assert json.loads(session.artifact("summary.json").read_text()) == {"steps": 2}
    assert session.artifact("report.html").read_text() == "<p>2 steps"
    assert stored.info.artifact_uri.startswith(
        Path(store.removeprefix("sqlite:///")).with_name("mlartifacts").as_uri()
    )
    page = f"http://127.0.0.1:5000/#/experiments/{stored.info.experiment_id}/runs/{stored.info.run_id}"
    assert f"{page} after mlflow ui --backend-store-uri {store}" in LOGGED.getvalue()
    experiment = session.client.get_experiment(stored.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_the_end_of_a_run_tells_what_to_type_or_open() -> None:
    serve = "mlflow ui --backend-store-uri"
    for uri, told in (
        ("http://me:secret@host:5000/", "http://me:***@host:5000/#/experiments/7/runs/abc"),
        ("sqlite:////data/my runs/m.db", f"{serve} 'sqlite:////data/my runs/m.db'"),
        ("postgresql://me:secret@host/m", f"{serve} 'postgresql://me:***@host/m'"),
    ):
        assert next(iter(addresses(uri, "7", "abc").values())) == told


def test_a_run_that_is_ended_early_keeps_odd_names_and_values_and_says_how_it_ended(
    run: RunContext, store: str
) -> None:
    session = TrackedRun(run, store).start()
    session.step(1, {"acc[5]": 1.0, "acc(5)": 2.0, "//a/../b?": math.nan, "": 3.0, "low": -math.inf})
    session.fail(SystemExit(143))
    assert session.stored.info.status == "KILLED"
    assert session.stored.data.tags["grpox.error"] == "SystemExit: 143"
    for name, value in (("acc_5_", 1.0), ("acc_5_-2", 2.0), ("_", 3.0)):
        assert session.values(name) == [(1, value)]
    ((_, nan),) = session.values("b_")
    assert math.isnan(nan)
    ((_, low),) = session.values("low")
    assert low < -1e308


def test_secrets_and_unwanted_completions_stay_out_of_mlflow(run: RunContext, store: str) -> None:
    config = run.config.model_copy(update={"generator": ComponentRef(name="mine", api_key="hush")})
    session = TrackedRun(replace(run, config=config), store, log_completions=False).start()
    session.score(1, ROLLOUTS)
    session.finish()
    names = {artifact.path for artifact in session.client.list_artifacts(session.stored.info.run_id)}
    assert names == {"config.yaml", "summary.json"}
    assert (run.output_dir / "completions" / "step_000001.parquet").exists()
    assert session.stored.data.params["generator.api_key"] == "***"
    assert session.artifact("config.yaml").read_text().count("***") == 1
    assert "hush" not in session.artifact("config.yaml").read_text() + str(session.stored.data)


def test_one_file_fails_alone(run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.INTERVAL", 0.1)
    session = TrackedRun(run, store).start()
    in_the_way = Path(url2pathname(urlsplit(session.stored.info.artifact_uri).path)) / "completions"
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("a file, where a folder should be")
    session.score(1, ROLLOUTS)
    deadline = time.monotonic() + patient(60)
    step = 0
    while "grpox sync" not in LOGGED.getvalue() and time.monotonic() < deadline:
        step += 1
        session.step(step, {"loss": 1.0})
        time.sleep(0.05)
    assert re.search(r"warning: .*completions.*\n.*run continues", LOGGED.getvalue())
    in_the_way.unlink()
    session.finish()
    assert session.stored.info.status == "FINISHED"
    assert session.values("loss") == [(number, 1.0) for number in range(1, step + 1)]
    assert session.artifact("completions/step_000001.parquet").is_file()


def test_the_config_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert resolved_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///new/other.db")
    assert resolved_uri(None) == f"sqlite:///{tmp_path}/new/other.db"
    assert resolved_uri("http://host:1") == "http://host:1"
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD"):
        MlflowConfig(tracking_uri="https://me:secret@host")


def test_a_store_that_can_never_be_used_ends_the_run_at_once_and_says_what_to_do(
    run: RunContext, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.db").write_text("this is no database, though long enough to look at" * 100)
    for uri, reason in (
        (f"sqlite:///{tmp_path}", "unable to open database file"),
        (f"sqlite:///{tmp_path}/broken.db", "file is not a database"),
        ("foo://me:secret@x", "foo"),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        environment = dict(os.environ)
        tracker = MlflowTracker(MlflowConfig())
        with pytest.raises(RunFailed, match=f"(?s){reason}.*MLFLOW_TRACKING_URI") as caught:
            tracker.grpox_run_started(run)
        assert "secret" not in str(caught.value)
        assert dict(os.environ) == environment
        tracker.grpox_run_failed(caught.value)  # there is nothing to end: it must not raise
    session = TrackedRun(run, store, experiment="gone")
    session.client.delete_experiment(session.client.create_experiment("gone"))
    with pytest.raises(RunFailed, match="'gone' was deleted"):
        session.start()


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:hu5h@127.0.0.1:9",
        # Without a look of our own, MLflow would try this again for 100 s.
        "postgresql://me:hu5h@127.0.0.1:9/db",
    ],
)
def test_a_run_begins_without_its_store(run: RunContext, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    environment = dict(os.environ)
    tracker = MlflowTracker(MlflowConfig())
    tracker.grpox_run_started(run)
    with pytest.raises(RunFailed, match=f"grpox sync {run.output_dir}") as caught:
        tracker.grpox_run_finished()
    told = LOGGED.getvalue()
    assert re.search("Connection refused(.|\n)*the run continues", told)
    assert dict(os.environ) == environment
    kept = (run.output_dir / "mlflow.json").read_text()
    assert "me:***@127.0.0.1" in kept
    # Not "secret": MLflow invents names for runs, such as secretive-shark-7.
    assert "hu5h" not in told + str(caught.value) + kept


def test_a_mute_server_delays_the_start_by_seconds_and_no_step(
    run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing_seconds = 0.5
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", closing_seconds)
    # As MLflow would be told to wait for hours and to try again: the run must come back all the same.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100000")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "8")
    with socket.create_server(("127.0.0.1", 0), backlog=100) as mute:
        session = TrackedRun(run, store)
        uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        session.config = session.config.model_copy(update={"tracking_uri": uri})
        session.start()
        for step in range(1, 51):
            session.step(step, {"loss": 1 / step})
        with pytest.raises(RunFailed, match="nothing is lost: grpox sync"):
            session.finish()
        mute.setblocking(False)
        requests = 0
        with suppress(BlockingIOError):
            while True:
                mute.accept()[0].close()
                requests += 1
    # Each waits so many seconds for an answer; then comes what the end waits.
    assert requests >= 1
    assert requests * PROBE_SECONDS + closing_seconds < 15
    assert sync(run.output_dir, store).status == "FINISHED"
    assert values_in(session) == values_of(run)


def values_of(run: RunContext) -> list[tuple[str, int, int, float]]:
    """Every value of the run's own record."""
    lines = map(json.loads, (run.output_dir / "metrics.jsonl").read_text().splitlines())
    return sorted(
        (name, line["step"], int(line["time"] * 1000), value)
        for line in lines
        for name, value in line["metrics"].items()
    )


def values_in(session: TrackedRun) -> list[tuple[str, int, int, float]]:
    """Every value that MLflow has of the run."""
    stored = session.stored
    return sorted(
        (name, metric.step, metric.timestamp, metric.value)
        for name in stored.data.metrics
        for metric in session.client.get_metric_history(stored.info.run_id, name)
    )


def dead(session: TrackedRun) -> None:
    """End the tracker's thread and free its lock, as the end of the process would."""
    writer = session.tracker._writer
    assert writer is not None
    writer.close(0.0, lambda: None)
    writer._thread.join(patient(60))
    assert not writer._thread.is_alive()
    session.tracker._environment.close()


@pytest.fixture
def away(run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch) -> TrackedRun:
    """A run of three steps whose server was never there; `stored` is what a sync into `store` makes of it."""
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 0.3)
    session = TrackedRun(run, store, run_name="away", tags={"team": "maths", "wandb_token": "hush"})
    session.config = session.config.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    session.start()
    session.score(1, ROLLOUTS)
    for step in (1, 2, 3):
        session.step(step, {"loss": 1 / step, "reward": step / 3})
    return session


def test_sync_writes_a_run_that_never_reached_its_server(away: TrackedRun, store: str) -> None:
    with pytest.raises(RunFailed, match="lacks 3 steps and the outcome of the run"):
        away.finish()
    tokens = away.run.output_dir / "tokens" / "step_000001.parquet"
    tokens.parent.mkdir()
    tokens.write_bytes(b"tokens")
    ended = (away.run.output_dir / "summary.json").stat().st_mtime_ns // 1_000_000
    done = sync(away.run.output_dir, store)
    assert (done.values, done.files, done.status) == (6, 1, "FINISHED")
    stored = away.stored
    assert (stored.info.run_name, stored.info.status, stored.info.end_time) == ("away", "FINISHED", ended)
    assert away.run.started is not None
    assert stored.info.start_time == int(away.run.started * 1000)  # of the command, not of its tracker
    assert stored.data.params["loss.clip_high"] == "0.28"
    assert stored.data.params["run.world_size"] == "2"
    assert {
        "team": "maths",
        "wandb_token": "***",
        "grpox.git.commit": "abc123",
    }.items() <= stored.data.tags.items()
    assert values_in(away) == values_of(away.run)
    files = ("completions/step_000001.parquet", "tokens/step_000001.parquet", "summary.json", "report.html")
    for path in ("config.yaml", *files):
        assert away.artifact(path).read_bytes() == (away.run.output_dir / path).read_bytes()

    again = sync(away.run.output_dir)  # where it was written is remembered
    assert (again.values, again.files) == (0, 0)
    assert values_in(away) == values_of(away.run)
    assert away.stored.info.end_time == ended


def test_sync_fills_the_holes_and_writes_nothing_twice(away: TrackedRun, store: str) -> None:
    dead(away)
    sync(away.run.output_dir, store)
    with (away.run.output_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 4.5, "metrics": {"loss": 0.25, "new": "nan"}}\n')
        file.write('{"step": 5, "time": 5.5, "metr')  # killed while it wrote
    assert sync(away.run.output_dir).values == 2
    assert sorted(away.values("loss")) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert ("loss", 4, 4500, 0.25) in values_in(away)


@pytest.mark.parametrize(
    ("error", "status"),
    # Without an error: SIGKILL left it no time to say anything.
    [(None, "KILLED"), (ValueError("see http://me:hush@host"), "FAILED"), (KeyboardInterrupt(), "KILLED")],
)
def test_sync_says_how_a_run_ended(away: TrackedRun, store: str, error: Exception | None, status: str) -> None:
    if error is not None:
        away.record.grpox_run_failed(away.run, error)
    dead(away)
    assert sync(away.run.output_dir, store).status == status
    assert away.stored.info.status == status
    assert "hush" not in str(away.stored.data.tags)
    assert ("grpox.error" in away.stored.data.tags) == (error is not None)


def test_sync_refuses_a_run_that_is_going_on_and_what_is_no_run(away: TrackedRun, tmp_path: Path) -> None:
    with hold(away.run.output_dir), pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} "):
        sync(away.run.output_dir)
    dead(away)

    with pytest.raises(ConfigError, match="no such folder") as caught:
        sync(tmp_path / "ran")
    assert caught.value.problems[0].nearest == str(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        sync(tmp_path)
    (away.run.output_dir / "mlflow.json").unlink()
    with pytest.raises(ConfigError, match="names no mlflow"):
        sync(away.run.output_dir)


def test_a_password_is_in_no_file(run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("grpox_mlflow.sync.WAIT_SECONDS", 0.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@127.0.0.1:9")
    session = TrackedRun(run, store)
    session.config = MlflowConfig()
    session.start()
    dead(session)
    with pytest.raises(
        RunFailed, match=r"http://me:\*\*\*@127\S+ cannot.*\n    tried for \d+ s; nothing is lost"
    ) as caught:
        sync(run.output_dir)
    assert "hush" not in str(caught.value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ConfigError, match="the password of the run's store"):
        sync(run.output_dir)
    left = (path.read_text() for path in run.output_dir.rglob("*") if path.is_file())
    assert not any("hush" in text for text in left)


def test_a_run_that_resumes_goes_on_in_its_mlflow_run_and_changes_are_tags(run: RunContext, store: str) -> None:
    session = TrackedRun(run, store).start()
    session.step(1, {"loss": 1.0})
    session.fail(ValueError("odd"))
    first = session.stored
    assert (first.info.status, first.data.tags["grpox.error"]) == ("FAILED", "ValueError: odd")

    config = run.config.model_copy(deep=True)
    config.train.learning_rate = 0.5
    size = (run.output_dir / "metrics.jsonl").stat().st_size
    session.start(config=config, resumed_at=1, metrics_bytes=size)
    session.step(2, {"loss": 2.0})
    session.finish()
    stored = session.stored
    assert stored.info.run_id == first.info.run_id
    assert stored.info.status == "FINISHED"
    assert "grpox.error" not in stored.data.tags
    assert stored.data.params == first.data.params
    assert stored.data.tags["changed.train.learning_rate"] == "1e-06 -> 0.5 after step 1"
    assert session.values("loss") == [(1, 1.0), (2, 2.0)]


def test_every_name_becomes_one_that_mlflow_accepts_and_they_stay_apart() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    names, long = MlflowNames(), "x" * 300
    odd = ["loss", "a/b", "a//b", "/a", "../a", ".", "", "a[b]", "é", "a/" * 200]
    told = [*odd, "a b", "a?", "a!", "a_", long + "1", long + "2"]
    first = [names[name] for name in told]
    for name in first:
        _validate_metric_name(name)
        _validate_param_name(name)
        assert len(name) <= NAME_LENGTH
    assert len(set(first)) == len(told)
    assert [names[name] for name in told] == first
    assert names["a b"] == "a b"


def test_a_config_is_flattened_to_its_leaves_and_only_long_values_are_cut() -> None:
    config = {"a": {"b": None, "c": [1, {"d": True}]}, "empty": {}, "none": [], "rate": 1e-6}
    assert dict(flattened(config)) == {
        "a.b": "None", "a.c.0": "1", "a.c.1.d": "True", "empty": "{}", "none": "[]", "rate": "1e-06",
    }  # fmt: skip
    assert shortened("x" * VALUE_LENGTH) == "x" * VALUE_LENGTH
    cut = shortened("x" * (VALUE_LENGTH + 1))
    assert len(cut) == VALUE_LENGTH
    assert "6001 characters" in cut


def test_a_write_that_fails_is_told_once_and_done_again_until_it_succeeds() -> None:
    done: list[str] = []
    failures = iter([ConnectionError("away"), ConnectionError("still away")])

    def write() -> None:
        if (error := next(failures, None)) is not None:
            raise error
        done.append("written")

    writer = Writer(write, pauses=(0.0,))
    writer.wake()
    assert writer.close(patient(60), lambda: None)
    assert "written" in done
    assert str(writer.take_error()) == "away"
    assert writer.take_error() is None


def test_writing_takes_no_more_than_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpox_mlflow.tracker.INTERVAL", 0.0)
    monkeypatch.setattr("grpox_mlflow.tracker.SHARE", 0.25)
    times: list[float] = []

    def write() -> None:
        times.append(time.monotonic())
        time.sleep(0.1)
        times.append(time.monotonic())

    writer = Writer(write)
    while len(times) < 4:
        writer.wake()
        time.sleep(0.01)
    assert times[2] - times[1] >= 0.4
    assert writer.close(patient(60), lambda: None)


OPENS = """
import sys, time
from pathlib import Path
from grpox_mlflow.store import open_store
Path(sys.argv[1]).touch()
while len(list(Path().glob("*.here"))) < 3:
    time.sleep(0.01)
open_store(f"sqlite:///{Path('mlflow.db').absolute()}", "new")
"""


def test_runs_that_begin_beside_a_new_database_all_open_it(tmp_path: Path) -> None:
    runs = [processes.start("-c", OPENS, f"{number}.here", cwd=tmp_path) for number in range(3)]
    assert [run.communicate()[1] for run in runs if run.wait() != 0] == []
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "0.here", "1.here", "2.here"}


@pytest.mark.parametrize(
    ("folder", "of_file", "in_sweep", "name"),
    [
        ("x" * 249 + "yz", None, False, "x" * 248 + "yz"),
        ("first", "mine", False, "mine"),
        ("beta=0.1", None, True, "beta=0.1"),
        ("beta=0.1", "x" * 250, True, "x" * 241 + " beta=0.1"),
    ],
)
def test_a_run_is_called_by_its_folder_unless_the_run_file_names_it(
    folder: str, of_file: str | None, in_sweep: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_sweep:
        monkeypatch.setenv(NAMED, "1")
    tracker = MlflowTracker(MlflowConfig(run_name=of_file))
    tracker._folder = Path(folder)
    assert tracker._name() == name
