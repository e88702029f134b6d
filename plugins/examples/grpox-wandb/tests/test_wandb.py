"""The contract of its kind; records that wandb has written offline, after hook calls and of a real run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpox
import psutil
import pytest
import wandb
from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.testing import ObserverConformance

from grpox_wandb.config import WandbConfig
from grpox_wandb.observer import Wandb

KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the settings and credentials of the user who runs the tests; in a folder without runs."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


class TestWandbObserver(ObserverConformance):
    component = "wandb"


def context(folder: Path, resumed_at: int | None = None) -> RunContext:
    data = {"path": "train.jsonl"}
    environment = {"url": "https://judge", "api_key": "sk-a-secret-of-the-judge"}
    rewards = [{"name": "exact"}, {"name": "judge", **environment}]
    content = {"model": {"path": "model"}, "data": data, "rewards": rewards}
    config = RunConfig.model_validate(content)
    return RunContext(config, folder, 2, 1, {"grpox": "0.1.0"}, "c0ffee", "mine.yaml", resumed_at)


def rollout(completion: str, reward: float | None = 1.0) -> ScoredRollout:
    sampled = Rollout(3, 0, (5, 6), (7, 2), "stop", 0)
    total = math.nan if reward is None else reward
    return ScoredRollout(sampled, "2+3=", completion, {"exact": reward, "brief": None}, total, 0.7)


def records(folder: Path) -> list[dict[str, Any]]:
    """Read what lies in the folder of one W&B run, with wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def folders(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_mtime_ns)


def history(read: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in read if record["type"] == "history"]


def summary(read: list[dict[str, Any]]) -> dict[str, Any]:
    updates = [record["summary"].get("update", {}) for record in read if record["type"] == "summary"]
    return {name: value for update in updates for name, value in update.items()}


def exit_code(read: list[dict[str, Any]]) -> int:
    [code] = [record["exit"].get("exit_code", 0) for record in read if record["type"] == "exit"]
    return int(code)


def described(read: list[dict[str, Any]]) -> dict[str, Any]:
    return next(record["run"] for record in read if record["type"] == "run")


def numbers(rows: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """(step, metric) -> value; without wandb's own columns and tables."""
    return {
        (row["step"], name): float(value)
        for row in rows
        for name, value in row.items()
        if not name.startswith(("_", "completions.")) and name not in ("step", "completions")
    }


def table_in(folder: Path) -> dict[str, Any]:
    [path] = (folder / "files").glob("media/table/*.table.json")
    return json.loads(path.read_text())


def services() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "wandb-core" in child.name()]


def follow(
    folder: Path, metrics: Mapping[str, float], resumed_at: int | None = None, **keys: Any
) -> list[dict[str, Any]]:
    """Follow a run of one step, and read the records."""
    observer = Wandb(WandbConfig(**keys))
    observer.grpox_run_started(context(folder, resumed_at))
    observer.grpox_step_finished((resumed_at or 0) + 1, metrics)
    observer.grpox_run_finished({"steps": 1})
    return records(folders(folder)[-1])


def test_a_real_run_has_in_wandb_what_its_metrics_say(tmp_path: Path) -> None:
    folder = tmp_path / "adder"
    grpox.train("quickstart", ["train.max_steps=3", "tracking={wandb: {}}", f"output_dir={folder}"])
    expected = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        prefix = "evaluation/" if "evaluation" in line else ""
        for name, value in (line.get("metrics") or line["evaluation"]).items():
            expected[line["step"], prefix + name.removeprefix(prefix)] = value
    [written] = folders(folder)
    read = records(written)
    assert {step for step, _ in expected} == {0, 1, 2, 3}
    assert numbers(history(read)) == pytest.approx(expected, nan_ok=True)
    [metric] = [record["metric"] for record in read if record["type"] == "metric"]
    assert (metric["glob_name"], metric["step_metric"]) == ("*", "step")
    run = described(read)
    assert (run["display_name"], run["project"]) == ("adder", "grpox")
    assert run["run_id"] == json.loads((folder / "wandb.json").read_text())["id"]
    assert run["config"]["update"]["train"]["max_steps"] == 3
    ending = json.loads((folder / "summary.json").read_text())
    assert summary(read)["accuracy_after"] == ending["accuracy_after"]
    assert exit_code(read) == 0
    assert len(table_in(written)["data"]) == 16
    # Nothing beside the run's folder, and no process.
    assert {path.name for path in tmp_path.iterdir()} <= {"adder", "home"}
    assert not list(tmp_path.glob("home/.local/share/wandb/**/*"))
    assert not services()


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    first = follow(tmp_path / "mine", {"reward": 0.25})
    second = follow(tmp_path / "mine", {"reward": 0.75}, resumed_at=1)
    assert described(first)["run_id"] == described(second)["run_id"]
    assert numbers(history(second)) == {(2, "reward"): 0.75}
    other = follow(tmp_path / "mine", {"reward": 0.5})  # not resumed: another run
    assert described(other)["run_id"] != described(first)["run_id"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("out of memory"), 1), (KeyboardInterrupt(), 255)],
    ids=["failed", "killed"],
)
def test_a_failed_run_keeps_its_steps_and_its_error(tmp_path: Path, error: BaseException, code: int) -> None:
    observer = Wandb(WandbConfig())
    observer.grpox_run_started(context(tmp_path / "mine"))
    observer.grpox_step_finished(1, {"reward": -math.inf})
    observer.grpox_run_failed(error)
    read = records(folders(tmp_path / "mine")[0])
    assert numbers(history(read)) == {(1, "reward"): -math.inf}
    assert summary(read)["error"] == f"{type(error).__name__}: {error}".removesuffix(": ")
    assert exit_code(read) == code
    assert not services()


def test_the_config_has_no_secret(tmp_path: Path) -> None:
    read = follow(tmp_path / "mine", {})
    config = described(read)["config"]["update"]
    assert config["grpox"] == {"versions": {"grpox": "0.1.0"}, "git_commit": "c0ffee", "world_size": 1}
    assert config["rewards"][1]["name"] == "judge"
    files = [path for path in folders(tmp_path / "mine")[0].rglob("*") if path.is_file()]
    assert not [path for path in files if b"sk-a-secret" in path.read_bytes()]


def test_completions_come_at_their_interval_and_up_to_their_number(tmp_path: Path) -> None:
    observer = Wandb(WandbConfig(completions=2, completions_every=2))
    observer.grpox_run_started(context(tmp_path / "mine"))
    for step in (1, 2):
        observer.grpox_rollouts_scored(step, [rollout(f"{step}{place}", None) for place in range(3)])
    observer.grpox_run_finished({})
    assert "WANDB_DATA_DIR" not in os.environ
    table = table_in(folders(tmp_path / "mine")[0])
    columns = ["group", "prompt", "completion", "reward", "advantage", "rewards/exact", "rewards/brief"]
    assert table["columns"] == [*columns, "finish_reason"]
    assert [row[2] for row in table["data"]] == ["10", "11"]
    assert table["data"][0] == [3, "2+3=", "10", None, 0.7, None, None, "stop"]


def test_the_run_file_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "of-environment")
    monkeypatch.setenv("WANDB_NAME", "a-name")
    run = described(follow(tmp_path / "mine", {}, project="of-run-file", tags=("adder",)))
    assert (run["project"], run["display_name"], run["tags"]) == ("of-run-file", "a-name", ["adder"])
    assert described(follow(tmp_path / "other", {}))["project"] == "of-environment"


@pytest.mark.parametrize("place", ["environment", "run file"])
def test_disabled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place == "environment":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    observer = Wandb(WandbConfig(mode="disabled" if place == "run file" else None))
    observer.grpox_run_started(context(tmp_path / "mine"))
    observer.grpox_step_finished(1, {"reward": 0.5})
    observer.grpox_run_finished({})
    assert not list((tmp_path / "mine").iterdir())


def test_online_without_a_key_ends_the_run_at_its_start(tmp_path: Path) -> None:
    observer = Wandb(WandbConfig(mode="online"))
    with pytest.raises(wandb.errors.UsageError) as caught:
        observer.grpox_run_started(context(tmp_path / "mine"))
    observer.grpox_run_failed(caught.value)
    assert not services()


def test_without_an_answer_the_run_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nothing listens
    read = follow(tmp_path / "mine", {"reward": 0.5}, timeout=1)
    assert numbers(history(read)) == {(1, "reward"): 0.5}
    assert [record.levelname for record in caplog.records if "does not answer" in record.message] == ["WARNING"]
    assert KEY not in caplog.text


def test_a_run_that_the_caller_has_open_goes_on(tmp_path: Path) -> None:
    own = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    follow(tmp_path / "mine", {"reward": 0.5})
    own.log({"mine": 1})
    assert wandb.run is own
    own.finish()
    wandb.teardown()
    [row] = history(records(folders(tmp_path)[0]))
    assert row["mine"] == 1
    assert "reward" not in row
