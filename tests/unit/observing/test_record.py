"""The local record reads back as what was told, byte for byte where that matters."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import yaml
from pyarrow import parquet
from support.logs import LoggedText

from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.observing.record import LocalRecord, sync_record, versions
from grpox.observing.token_files import token_file
from grpox.runtime.files import write_atomically


def context(folder: Path, **logging: int) -> RunContext:
    config = RunConfig.model_validate(
        {
            "model": {"path": "models/ü"},
            "data": {"path": "d.jsonl"},
            "rewards": ["math", {"path": "rewards.py:short", "weight": 0.5, "limit": 3}],
            "loss": {"name": "dapo", "clip_high": 0.28},
            "train": {"learning_rate": 1e-6},
            "logging": logging,
        }
    )
    return RunContext(config, folder / "deep" / "run", 10, 2, {"grpox": "0.1.0"}, "abc123", "run.yaml")


def scored(group: int, sample: int, **rewards: float | None) -> ScoredRollout:
    rollout = Rollout(group, sample, (1, 2), (3, 4, 5), "length", policy_version=7)
    return ScoredRollout(rollout, "1+1=", "is\n2 ✓", rewards, reward=0.5, advantage=-1.25)


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return context(tmp_path)


@pytest.fixture
def record(run: RunContext) -> LocalRecord:
    record = LocalRecord()
    record.grpox_run_started(run)
    return record


@pytest.mark.usefixtures("record")
def test_the_config_reads_back_as_the_same_config(run: RunContext) -> None:
    text = (run.output_dir / "config.yaml").read_text(encoding="utf-8")
    assert RunConfig.model_validate(yaml.safe_load(text)) == run.config


@pytest.mark.usefixtures("record")
def test_versions_say_what_the_run_was_made_with(run: RunContext) -> None:
    installed = versions(["pytest", "grpox-of-nobody"])  # one that is not installed has none
    assert installed["pytest"] == pytest.__version__
    assert "grpox-of-nobody" not in installed
    assert json.loads((run.output_dir / "versions.json").read_text()) == {
        "versions": {"grpox": "0.1.0"},
        "git_commit": "abc123",
        "total_steps": 10,
        "world_size": 2,
        "source": "run.yaml",
    }


def test_metrics_are_strict_json_and_keep_every_digit(run: RunContext, record: LocalRecord) -> None:
    told = {"loss": 0.1 + 0.2, "kl": math.nan, "low": -math.inf, "high": math.inf}
    record.grpox_step_finished(1, told)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads((run.output_dir / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"loss": 0.30000000000000004, "kl": "nan", "low": "-inf", "high": "inf"}
    assert {name: float(value) for name, value in line["metrics"].items()} == pytest.approx(told, nan_ok=True)


def test_a_line_is_on_disk_before_the_hook_returns(run: RunContext, record: LocalRecord) -> None:
    before = time.time()
    record.grpox_step_finished(1, {"loss": 1.0})
    record.grpox_evaluated(1, {"accuracy": 0.25})
    first, second = map(json.loads, (run.output_dir / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["metrics"]) == (1, {"loss": 1.0})
    assert (second["step"], second["evaluation"]) == (1, {"accuracy": 0.25})
    assert before <= first["time"] <= second["time"] <= time.time()


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("loss is NaN ✗"), "ValueError: loss is NaN ✗"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_run_that_fails_leaves_its_error(
    run: RunContext, record: LocalRecord, error: BaseException, told: str
) -> None:
    record.grpox_run_failed(run, error)
    assert json.loads((run.output_dir / "failure.json").read_text(encoding="utf-8")) == {"error": told}


def test_a_second_run_sets_the_record_of_the_first_aside(run: RunContext, record: LocalRecord) -> None:
    record.grpox_step_finished(1, {"loss": 1.0})
    record.grpox_rollouts_scored(1, [scored(0, 0, math=1.0)])
    (run.output_dir / "summary.json").write_text("{}")
    (run.output_dir / "model").mkdir()
    (run.output_dir / "report.html").write_text("first")
    record.grpox_run_failed(run, ValueError("first"))
    again = LocalRecord()
    again.grpox_run_started(run)
    again.grpox_step_finished(1, {"loss": 2.0})
    (aside,) = (run.output_dir / "earlier").iterdir()
    names = {"config.yaml", "versions.json", "metrics.jsonl", "completions", "summary.json"}
    names |= {"failure.json", "report.html", "model"}
    assert {path.name for path in aside.iterdir()} == names
    assert json.loads((aside / "metrics.jsonl").read_text())["metrics"] == {"loss": 1.0}
    assert json.loads((run.output_dir / "metrics.jsonl").read_text())["metrics"] == {"loss": 2.0}
    assert not (run.output_dir / "model").exists()
    assert not (run.output_dir / "summary.json").exists()


def test_runs_that_end_in_the_same_second_are_set_aside_apart(run: RunContext, record: LocalRecord) -> None:
    for loss in (1.0, 2.0, 3.0):
        record.grpox_step_finished(1, {"loss": loss})
        record.grpox_rollouts_scored(1, [scored(0, 0, math=loss)])
        os.utime(run.output_dir / "metrics.jsonl", (1.7e9, 1.7e9))
        record = LocalRecord()
        record.grpox_run_started(run)
    first, second, third = sorted((run.output_dir / "earlier").iterdir())
    ended = time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(1.7e9))
    assert [first.name, second.name, third.name] == [ended, f"{ended}-2", f"{ended}-3"]
    losses = [
        json.loads((folder / "metrics.jsonl").read_text())["metrics"]["loss"] for folder in (first, third)
    ]
    assert losses == [1.0, 3.0]
    assert len(list((second / "completions").iterdir())) == 1


def test_a_record_without_a_step_is_set_aside_whole_and_a_model_of_another_stays(tmp_path: Path) -> None:
    run = context(tmp_path)
    (run.output_dir / "model").mkdir(parents=True)
    (run.output_dir / "config.yaml").write_text("mine")
    record = LocalRecord()
    record.grpox_run_started(run)
    (aside,) = (run.output_dir / "earlier").iterdir()
    assert (aside / "config.yaml").read_text() == "mine"
    assert (run.output_dir / "model").is_dir()
    shutil.rmtree(run.output_dir / "earlier")
    (run.output_dir / "model").rmdir()
    record.grpox_run_failed(run, ValueError("no such model"))
    LocalRecord().grpox_run_started(run)
    (aside,) = (run.output_dir / "earlier").iterdir()
    assert {path.name for path in aside.iterdir()} == {"config.yaml", "versions.json", "failure.json"}


def test_what_reward_functions_log_of_a_completion_becomes_a_column(
    run: RunContext, record: LocalRecord
) -> None:
    rows = [scored(0, 0, math=1.0), scored(0, 1, math=0.0), scored(0, 2, math=0.0)]
    extras = [
        {"steps": 3, "why": "no carry", "gold": 10**30},
        {"steps": None, "why": ["a", 1], "gold": 7},
        {"odd": "a\ud800"},
    ]
    told = [replace(row, extra=extra) for row, extra in zip(rows, extras, strict=True)]
    record.grpox_rollouts_scored(1, told)
    table = parquet.read_table(run.output_dir / "completions" / "step_000001.parquet")
    assert table["extra/steps"].to_pylist() == [3, None, None]
    assert table["extra/why"].to_pylist() == ["no carry", "['a', 1]", None]
    assert table["extra/gold"].to_pylist() == [str(10**30), "7", None]  # beyond what a column of numbers holds
    assert table["extra/odd"].to_pylist() == [None, None, "a\\ud800"]


def test_the_columns_of_the_data_are_saved(run: RunContext, record: LocalRecord) -> None:
    columns = [
        {"answer": 5, "level": 1, "tests": [{"in": math.nan}, "é"], "when": date(2026, 1, 2)},
        {"answer": "five", "level": None, "tests": {}, "when": None},
    ]
    rows = [replace(scored(0, 0, math=1.0), columns=each) for each in columns]
    record.grpox_rollouts_scored(1, rows)
    table = parquet.read_table(run.output_dir / "completions" / "step_000001.parquet")
    assert [name for name in table.column_names if name.startswith("data/")] == [
        "data/answer", "data/level", "data/tests", "data/when",
    ]  # fmt: skip
    assert table["data/answer"].to_pylist() == ["5", "five"]  # a column has one type
    assert table["data/level"].to_pylist() == [1, None]
    assert table["data/tests"].to_pylist() == ['[{"in": "nan"}, "é"]', "{}"]
    assert table["data/when"].to_pylist() == ["2026-01-02", None]


def test_completions_read_back_with_a_column_per_reward(run: RunContext, record: LocalRecord) -> None:
    record.grpox_rollouts_scored(5, [scored(0, 0, math=1.0, short=None), scored(0, 1, math=0.0, short=0.5)])
    table = parquet.read_table(run.output_dir / "completions" / "step_000005.parquet")
    assert table.column_names == [
        "step", "group", "sample", "prompt", "completion", "reward", "advantage", "rewards/math",
        "rewards/short", "finish_reason", "policy_version", "completion_length",
    ]  # fmt: skip
    assert table.to_pylist()[0] == {
        "step": 5, "group": 0, "sample": 0, "prompt": "1+1=", "completion": "is\n2 ✓", "reward": 0.5,
        "advantage": -1.25, "rewards/math": 1.0, "rewards/short": None, "finish_reason": "length",
        "policy_version": 7, "completion_length": 3,
    }  # fmt: skip
    assert table["rewards/short"].to_pylist() == [None, 0.5]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 3, 5]), (2, [1, 5]), (0, [])])
def test_completions_are_saved_every_so_many_generation_batches(
    tmp_path: Path, every: int, steps: list[int]
) -> None:
    run = context(tmp_path, save_completions_every=every)
    record = LocalRecord()
    record.grpox_run_started(run)
    for step in (1, 3, 5):
        record.grpox_rollouts_scored(step, [scored(0, 0, math=1.0)])
    files = sorted(path.name for path in run.output_dir.glob("completions/*"))
    assert files == [f"step_{step:06d}.parquet" for step in steps]


def test_two_generation_batches_of_one_step_do_not_overwrite_each_other(
    run: RunContext, record: LocalRecord
) -> None:
    for reward, name in ((1.0, "step_000001.parquet"), (0.0, "step_000001_2.parquet")):
        record.grpox_rollouts_scored(1, [scored(0, 0, math=reward)])
        table = parquet.read_table(run.output_dir / "completions" / name)
        assert table["rewards/math"].to_pylist() == [reward]


def lines_of(run: RunContext, name: str = "metrics.jsonl") -> list[int]:
    """Return the step of each line; anything that is no line of JSON fails."""
    path = run.output_dir / name
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("lost", [1, 30, 10**6, None])
def test_metrics_that_a_disk_lost_are_told_and_never_padded(
    run: RunContext, record: LocalRecord, logged: LoggedText, lost: int | None
) -> None:
    """As after a power cut; None: the file is gone."""
    for step in (1, 2, 3):
        record.grpox_step_finished(step, {"loss": 1.0})
    metrics = run.output_dir / "metrics.jsonl"
    whole = metrics.read_bytes()
    if lost is None:
        metrics.unlink()
    else:
        metrics.write_bytes(whole[: max(0, len(whole) - lost)])
    size = metrics.stat().st_size if lost is not None else 0
    again = LocalRecord()
    again.grpox_run_started(replace(run, resumed_at=3, metrics_bytes=len(whole)))
    again.grpox_step_finished(4, {"loss": 1.0})
    kept = {1: [1, 2, 3], 30: [1, 2]}.get(lost or 0, [])
    assert lines_of(run) == [*kept, 4]
    told = logged()
    assert told.startswith(f"warning: {metrics} has {size} bytes, and had {len(whole)} when the checkpoint was")


def test_metrics_since_the_checkpoint_are_undone_and_nothing_is_told(
    run: RunContext, record: LocalRecord, logged: LoggedText
) -> None:
    record.grpox_step_finished(1, {"loss": 1.0})
    size = (run.output_dir / "metrics.jsonl").stat().st_size
    record.grpox_step_finished(2, {"loss": 1.0})
    LocalRecord().grpox_run_started(replace(run, resumed_at=1, metrics_bytes=size))
    assert (lines_of(run), lines_of(run, "metrics.undone.jsonl")) == ([1], [2])
    assert logged() == ""


def test_tokens_of_steps_that_are_repeated_are_removed(run: RunContext, record: LocalRecord) -> None:
    for step in (1, 2, 3):
        write_atomically(token_file(run.output_dir, step), "tokens")
    LocalRecord().grpox_run_started(replace(run, resumed_at=2))
    left = sorted(path.name for path in (run.output_dir / "tokens").iterdir())
    assert left == ["step_000001.parquet", "step_000002.parquet"]
    LocalRecord().grpox_run_started(run)  # another run in the same folder
    assert not (run.output_dir / "tokens").exists()


def test_what_a_checkpoint_relies_on_is_on_the_disk_before_it(
    run: RunContext, record: LocalRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        record.grpox_rollouts_scored(step, [scored(0, 0, math=1.0)])
        write_atomically(token_file(run.output_dir, step), "tokens")
        record.grpox_step_finished(step, {"loss": 1.0})
    synced = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    metrics = run.output_dir / "metrics.jsonl"
    assert sync_record(run.output_dir, 1) == metrics.stat().st_size
    folders = [run.output_dir / "completions", run.output_dir / "tokens"]
    new = [folder / f"step_00000{step}.parquet" for folder in folders for step in (2, 3)]
    assert sorted(synced) == sorted(map(str, [*new, *folders, metrics, run.output_dir]))
