"""MLflow holds what the run told it, value for value, in a real SQLite store, or says that it does not."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_metric_name, _validate_param_name
from pydantic import ValidationError
from rich.console import Console

from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import RunFailed
from grpox.observing.record import LocalRecord
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.naming import NAME_LENGTH, VALUE_LENGTH, Names, flattened, shortened
from grpox_mlflow.store import quick_requests, resolved_uri, without_password
from grpox_mlflow.tracker import MlflowTracker
from grpox_mlflow.writer import Writer

ROLLOUTS = [ScoredRollout(Rollout(0, 0, (1,), (2, 3), "stop", 0), "1+1=", "2", {"math": 1.0}, 1.0, 0.5)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the whole file: creating one takes seconds."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "chat_template_kwargs": {"long": "x" * 7000, "odd key!": 1}},
            "data": {"path": "d.jsonl"},
            "rewards": ["math", {"path": "rewards.py:short", "weight": 0.5}],
            "loss": {"name": "dapo", "clip_high": 0.28},
        }
    )
    versions = {"grpox": "0.1.0", "torch": "2.13.0"}
    return RunContext(config, tmp_path / "run", 10, 2, versions, "abc123", "run.yaml")


class Session:
    """A tracker and the record it takes files from, as a run drives them."""

    def __init__(self, run: RunContext, store: Path, **config: Any) -> None:
        self.run, self.output = run, io.StringIO()
        self.config = MlflowConfig(tracking_uri=f"sqlite:///{store}", **config)
        self.tracker = MlflowTracker(self.config, Console(file=self.output, width=200))
        self.client = MlflowClient(f"sqlite:///{store}")

    def start(self) -> Session:
        self.record = LocalRecord()
        self.record.grpox_run_started(self.run)
        self.tracker.grpox_run_started(self.run)
        return self

    def score(self, step: int) -> None:
        self.record.grpox_rollouts_scored(step, ROLLOUTS)
        self.tracker.grpox_rollouts_scored(step)

    def finish(self) -> None:
        (self.run.output_dir / "summary.json").write_text('{"steps": 2}')
        (self.run.output_dir / "report.html").write_text("<p>2 steps")
        self.tracker.grpox_run_finished(self.run)

    @property
    def stored(self) -> Any:
        experiment = self.client.get_experiment_by_name(self.config.experiment)
        return self.client.search_runs([experiment.experiment_id])[0]

    def values(self, name: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.stored.info.run_id, name)
        return [(metric.step, metric.value) for metric in history]

    def artifact(self, path: str) -> Path:
        return Path(self.client.download_artifacts(self.stored.info.run_id, path))


def test_a_finished_run_reads_back_value_for_value(run: RunContext, store: Path) -> None:
    session = Session(run, store, run_name="first", tags={"team": "maths"}).start()
    before = time.time_ns() // 1_000_000
    session.score(1)
    for step in (1, 2):
        session.tracker.grpox_step_finished(step, {"loss": 0.1 + step, "rewards/math/mean": 1 / 3})
    session.tracker.grpox_evaluated(2, {"accuracy": 0.25})
    session.tracker.grpox_checkpoint_saved(run.output_dir / "model")
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
        "grpox.checkpoint": str(run.output_dir / "model"),
    }  # fmt: skip
    assert expected.items() <= stored.data.tags.items()
    for path in ("config.yaml", "completions/step_000001.parquet"):
        assert session.artifact(path).read_bytes() == (run.output_dir / path).read_bytes()
    assert json.loads(session.artifact("summary.json").read_text()) == {"steps": 2}
    assert session.artifact("report.html").read_text() == "<p>2 steps"
    assert stored.info.artifact_uri.startswith((store.parent / "mlartifacts").as_uri())
    assert f"mlflow ui --backend-store-uri sqlite:///{store}" in session.output.getvalue()


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("http://me:secret@host:5000/", "http://me:***@host:5000/#/experiments/7/runs/abc"),
        ("sqlite:////data/my runs/m.db", "mlflow ui --backend-store-uri 'sqlite:////data/my runs/m.db'"),
        ("postgresql://me:secret@host/m", "mlflow ui --backend-store-uri 'postgresql://me:***@host/m'"),
    ],
)
def test_the_end_of_a_run_tells_what_to_type_or_open(uri: str, told: str) -> None:
    tracker = MlflowTracker(MlflowConfig())
    tracker._uri, tracker._experiment_id, tracker._run_id = uri, "7", "abc"
    assert tracker._place() == told


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("loss is NaN"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(143), "KILLED"),
    ],
)
def test_a_run_that_ends_early_keeps_its_metrics_and_says_how_it_ended(
    run: RunContext, store: Path, error: BaseException, status: str
) -> None:
    session = Session(run, store).start()
    session.tracker.grpox_step_finished(1, {"loss": 1.0})
    session.tracker.grpox_run_failed(error)
    assert session.stored.info.status == status
    assert session.stored.data.tags["grpox.error"] == f"{type(error).__name__}: {error}"
    assert session.values("loss") == [(1, 1.0)]


def test_odd_metric_names_and_values_arrive(run: RunContext, store: Path) -> None:
    session = Session(run, store).start()
    session.tracker.grpox_step_finished(
        1, {"acc[5]": 1.0, "acc(5)": 2.0, "//a/../b?": math.nan, "": 3.0, "low": -math.inf}
    )
    session.finish()
    assert session.values("acc_5_") == [(1, 1.0)]
    assert session.values("acc_5_-2") == [(1, 2.0)]
    assert session.values("_") == [(1, 3.0)]
    ((_, nan),) = session.values("b_")
    assert math.isnan(nan)
    ((_, low),) = session.values("low")
    assert low < -1e308


def test_completions_stay_on_disk_when_not_wanted(run: RunContext, store: Path) -> None:
    session = Session(run, store, log_completions=False).start()
    session.score(1)
    session.finish()
    names = {artifact.path for artifact in session.client.list_artifacts(session.stored.info.run_id)}
    assert names == {"config.yaml", "summary.json"}
    assert (run.output_dir / "completions" / "step_000001.parquet").exists()


def test_a_write_that_fails_is_raised_by_the_next_hook_and_loses_nothing_else(
    run: RunContext, store: Path
) -> None:
    session = Session(run, store).start()
    (run.output_dir / "completions").mkdir()
    session.tracker.grpox_rollouts_scored(1)  # nobody wrote the file
    deadline = time.monotonic() + 10
    with pytest.raises(RunFailed, match=r"step_000001\.parquet"):  # noqa: PT012 - until the writer gets there
        while time.monotonic() < deadline:
            session.tracker.grpox_step_finished(1, {"loss": 1.0})
            time.sleep(0.01)
    session.finish()
    assert session.stored.info.status == "FINISHED"
    assert session.values("loss")[0] == (1, 1.0)


def test_the_config_goes_before_the_environment_and_a_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert resolved_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///new/other.db")
    assert resolved_uri(None) == f"sqlite:///{tmp_path}/new/other.db"
    assert resolved_uri("http://host:1") == "http://host:1"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        # Without a look of our own, MLflow would try these two again for 100 s.
        ("postgresql://user:secret@127.0.0.1:9/db", "Connection refused"),
        ("sqlite:///{folder}", "unable to open database file"),
        ("sqlite:///{folder}/broken.db", "file is not a database"),
        ("foo://x", "foo"),
    ],
)
def test_a_store_that_cannot_be_used_ends_the_run_at_once_and_says_what_to_do(
    run: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, reason: str
) -> None:
    (tmp_path / "broken.db").write_text("this is no database, though long enough to look at" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(folder=tmp_path))
    environment = dict(os.environ)
    tracker = MlflowTracker(MlflowConfig())
    begun = time.monotonic()
    with pytest.raises(RunFailed, match=f"(?s){reason}.*MLFLOW_TRACKING_URI") as caught:
        tracker.grpox_run_started(run)
    assert time.monotonic() - begun < 10
    assert "secret" not in str(caught.value)
    assert dict(os.environ) == environment
    tracker.grpox_run_failed(caught.value)  # there is nothing to end: it must not raise


def test_a_deleted_experiment_is_named(run: RunContext, store: Path) -> None:
    client = MlflowClient(f"sqlite:///{store}")
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(RunFailed, match="'gone' was deleted"):
        Session(run, store, experiment="gone").start()


def test_quick_requests_give_the_environment_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    with quick_requests():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_a_password_belongs_neither_in_the_config_nor_in_a_message() -> None:
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD"):
        MlflowConfig(tracking_uri="https://me:secret@host")
    assert without_password("https://me:secret@host:5000/x") == "https://me:***@host:5000/x"


@pytest.mark.parametrize(
    "name", ["loss", "a/b", "a//b", "/a", "../a", ".", "", "a[b]", "é", "x" * 400, "a/" * 200]
)
def test_every_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    given = Names()[name]
    _validate_metric_name(given)
    _validate_param_name(given)
    assert len(given) <= NAME_LENGTH


def test_names_stay_apart_and_stay_the_same() -> None:
    names = Names()
    long = "x" * 300
    told = ["a b", "a?", "a!", "a_", long + "1", long + "2"]
    first = [names[name] for name in told]
    assert len(set(first)) == len(told)
    assert [names[name] for name in told] == first
    assert names["a b"] == "a b"


def test_a_config_is_flattened_to_its_leaves() -> None:
    config = {"a": {"b": None, "c": [1, {"d": True}]}, "empty": {}, "none": [], "rate": 1e-6}
    assert dict(flattened(config)) == {
        "a.b": "None", "a.c.0": "1", "a.c.1.d": "True", "empty": "{}", "none": "[]", "rate": "1e-06",
    }  # fmt: skip


def test_only_a_value_that_mlflow_would_cut_is_cut_and_says_so() -> None:
    assert shortened("x" * VALUE_LENGTH) == "x" * VALUE_LENGTH
    cut = shortened("x" * (VALUE_LENGTH + 1))
    assert len(cut) == VALUE_LENGTH
    assert "6001 characters" in cut


def test_listing_the_plugin_imports_neither_mlflow_nor_torch() -> None:
    code = (
        "import sys, grpox_mlflow.plugin, grpox_mlflow.configs; print({'mlflow', 'torch'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"


def silent(_: int) -> None:
    """Progress that nobody looks at."""


def failing(times: int, done: list[str]) -> Callable[[], None]:
    left = iter(range(times))

    def write() -> None:
        if next(left, None) is not None:
            raise ConnectionError("away")
        done.append("written")

    return write


def test_a_passing_error_is_told_and_the_write_is_tried_again_in_its_place() -> None:
    done: list[str] = []
    writer = Writer(lambda error: True, pauses=(0.0, 0.0))
    writer.submit(failing(2, done))
    assert writer.close(5, lambda: done.append("last"), silent)
    assert done == ["written", "last"]
    assert isinstance(writer.take_error(), ConnectionError)
    assert writer.take_error() is None
    assert writer.lost == 0


def test_a_lasting_error_gives_up_that_write_alone() -> None:
    done: list[str] = []
    writer = Writer(lambda error: False, pauses=(60.0,))
    writer.submit(failing(1, done))
    assert writer.close(5, lambda: done.append("last"), silent)
    assert done == ["last"]
    assert writer.lost == 1


def test_submitting_never_blocks_and_a_full_queue_refuses() -> None:
    gate, done = threading.Event(), []
    writer = Writer(lambda error: False, limit=2)
    writer.submit(partial(gate.wait, 5))
    while writer.waiting:  # until the first write is at work
        time.sleep(0.001)
    for number in range(3):
        writer.submit(lambda number=number: done.append(number))
    assert isinstance(writer.take_error(), RuntimeError)
    gate.set()
    assert writer.close(5, lambda: done.append("last"), silent)
    assert done == [0, 1, "last"]
    assert writer.lost == 1


def test_closing_waits_no_longer_than_told_and_counts_what_is_missing() -> None:
    gate = threading.Event()
    writer = Writer(lambda error: False)
    told: list[int] = []
    for _ in range(3):
        writer.submit(partial(gate.wait, 5))
    begun = time.monotonic()
    assert not writer.close(0.2, lambda: None, told.append)
    assert time.monotonic() - begun < 2
    assert writer.lost == 4  # the one at work, two behind it, and the last
    assert told[0] == 4
    gate.set()
