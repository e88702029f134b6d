"""A run's folder that somebody else has written: one line with the file, and no wait, full memory or crash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from support.contexts import config_of, context_of
from support.frozen import answers_of
from support.logs import LOGGED
from support.watched_runs import append_metrics, metrics_line, write_batch, write_record

from grpox.checkpoint.folders import FileFacts, read_manifest
from grpox.checkpoint.progress import Progress
from grpox.errors import ConfigError, RunFailed
from grpox.observing.page.report import render
from grpox.observing.page.server import answer
from grpox.observing.page.source import RunSource
from grpox.observing.record import LocalRecord, finished, recorded_choices, sync_record
from grpox.runfile.lock.model import read_lock
from grpox.runtime.files import atomic_path, open_regular, read_mapping
from grpox.runtime.run_lock import is_locked

HUGE, DEEP = "1" + "0" * 400, "[" * 100_000
BATCH = "completions/step_000001.parquet"
FILES = ("versions.json", "summary.json", "failure.json", "alarms.json", "config.yaml")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_record(tmp_path / "run")
    append_metrics(folder, metrics_line(1, {"reward": 0.5}), metrics_line(2, {"reward": 0.75}))
    write_batch(folder, 1, [("2+2=", "4", 1.0), ("2+2=", "5", 0.0)])
    return folder


def asked(folder: Path) -> list[str]:
    """Ask what the page asks, as JSON; return the problems that it shows, and that a report warns of."""
    source = RunSource(folder)
    try:
        answers = [source.run(), source.metrics(), source.phases(), source.completions()]
        assert all(answer(each).status_code == 200 for each in answers)
        return [str(each) for each in answers[0]["problems"]]
    finally:
        source.close()


def warned(folder: Path) -> list[str]:
    """Render the report; return what it warns of."""
    warnings: list[str] = []
    render([folder], warn=warnings.append)
    return [text.removeprefix(f"{folder}: ") for text in warnings]


@pytest.mark.parametrize("name", [*FILES, "metrics.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_not_read(run: Path, name: str, make: Callable[[Path], None]) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)
    assert any(name in problem and "no regular file" in problem for problem in asked(run))
    if name == "metrics.jsonl":
        with pytest.raises(ConfigError, match=name):
            render([run])
    else:
        assert warned(run) == asked(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, text) for name in FILES[:4] for text in ("[]", "{", DEEP, f'{{"a": {HUGE}}}', '{"a": 1e999}')),
        *(("versions.json", f'{{"world_size": {size}}}') for size in (10**8, -1, '"2"', "true", "[1]")),
        ("versions.json", '{"total_steps": -5}'),
        ("versions.json", '{"versions": 3}'),
        ("summary.json", '{"train_seconds": 1e300}'),
        ("summary.json", '{"parameters": "7", "trained_parameters": 3}'),
        ("summary.json", '{"stopped_early": [1]}'),
        ("config.yaml", "a: " + DEEP),
        ("config.yaml", "\xff"),
    ],
)
def test_json_that_no_run_writes_is_one_problem_with_its_file(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content, encoding="latin-1")
    problems = asked(run)
    assert [problem for problem in problems if problem.startswith(name)], problems
    assert warned(run) == problems


def test_a_config_of_other_types_has_a_page_and_foreign_metrics_are_counted(run: Path) -> None:
    for config in ("rewards: 3", "rewards: [3]", "tracking: {a: b}", "tracking: 7", "train: x"):
        (run / "config.yaml").write_text(config)
        assert asked(run) == [], config
    written = (run / "metrics.jsonl").read_text()
    for line in (
        *(f'{{"step": {step}, "time": 1, "metrics": {{}}}}' for step in (HUGE, "1e999", -3, "null", "[]")),
        *(f'{{"step": 3, "time": {time}, "metrics": {{}}}}' for time in ("1e999", "NaN")),
        *(f'{{"step": 3, "time": 1, "metrics": {{"a": {value}}}}}' for value in (HUGE, "[]")),
        DEEP,
    ):
        (run / "metrics.jsonl").write_text(f"{written}{line}\n")
        problem = "metrics.jsonl: 1 line cannot be read, the first is line 3"
        assert problem in asked(run), line
        LOGGED()
        assert answers_of(run)["metrics"]["series"]["reward"] == [[1, 2], [0.5, 0.75]]
        assert LOGGED() == f"warning: {run}: {problem}\n"


@pytest.mark.parametrize("column", ["step", "group", "prompt", "completion", "reward", "finish_reason"])
@pytest.mark.parametrize("change", ["missing", "null", "texts", "lists"])
def test_columns_that_no_run_writes_are_told_with_the_file(run: Path, column: str, change: str) -> None:
    table = parquet.read_table(run / BATCH)
    place = table.column_names.index(column)
    values: dict[str, Any] = {"null": [None, None], "texts": ["x", "y"], "lists": [[1], [2]]}
    table = table.remove_column(place)
    if change != "missing":
        table = table.append_column(column, pyarrow.array(values[change]))
    parquet.write_table(table, run / BATCH)
    if change != "texts" or column in ("step", "group", "reward"):
        with pytest.raises(ConfigError, match="step_000001"):
            render([run])
    is_shown_alone = column in ("group", "completion", "finish_reason") and change in ("null", "lists")
    if is_shown_alone or (column, change) == ("group", "texts"):  # shown, and not searched
        with pytest.raises(ConfigError, match="step_000001"):
            asked(run)
    else:
        asked(run)


def test_a_pipe_among_the_files_is_never_waited_for(run: Path, tmp_path: Path) -> None:
    (run / BATCH).unlink()
    for name in (BATCH, "grpox.lock", "plugins.lock.json", "manifest.json", "run.json", "pipe"):
        os.mkfifo(run / name)
    asked(run)
    with pytest.raises(ConfigError, match="step_000001"):
        render([run])
    with pytest.raises(ConfigError, match="no regular file"):
        read_lock(run)
    for read in (read_manifest, Progress.read):
        with pytest.raises(ValueError, match="no regular file"):
            read(run)
    with pytest.raises(OSError, match="no regular file"):
        FileFacts.of(run / "pipe")
    assert read_mapping(run / "pipe") == {}
    assert not is_locked(run)
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert (finished(config_of(output_dir=str(run)), 10), recorded_choices(run)) == (None, {})
    with pytest.raises(OSError, match="Invalid argument"):
        sync_record(run, 0)  # which syncs the pipe among the completions


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.undone.jsonl"])
def test_a_resume_writes_through_no_link(run: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    other.write_text((run / "metrics.jsonl").read_text())
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(other)
    before = other.read_text()
    with pytest.raises(RunFailed, match=f"{name} cannot be written: is a link"):
        LocalRecord().grpox_run_started(replace(context_of(run), resumed_at=1, metrics_bytes=10))
    assert other.read_text() == before
    with pytest.raises(OSError, match="is a link"):
        open_regular(run / name, "ab")
    (run / "x.unfinished").symlink_to(other)
    with atomic_path(run / "x") as unfinished:
        unfinished.write_text("new")
    assert other.read_text() == before


def test_a_checkpoint_out_of_bounds_is_refused_with_the_key(tmp_path: Path) -> None:
    train = {"max_steps": 3, "per_device_train_batch_size": 8, "num_generations": 8}
    lock = {"api": 1, "config": "", "versions": {}, "distributions": {}, "components": {}}
    whole = {"step": 1, "world_size": 1, "num_tokens": 1, "seconds": 1.0, "evaluation_before": {}}
    whole |= {"metrics": {}, "metrics_bytes": 0, "config": {"train": train}, "data": {}, "lock": lock}
    (tmp_path / "run.json").write_text(json.dumps(whole))
    assert Progress.read(tmp_path).step == 1
    changes: list[dict[str, Any]] = [
        {"prompts_drawn": -5}, {"step": -1}, {"world_size": 10**9}, {"world_size": 0}, {"seconds": "x"},
        {"losses": [1]}, {"config": {}}, {"config": {"train": 3}}, {"metrics_bytes": 1e30},
    ]  # fmt: skip
    for change in changes:
        (tmp_path / "run.json").write_text(json.dumps(whole | change))
        key = "[Tt]rain" if "config" in change else next(iter(change))
        with pytest.raises(ValueError, match=f"run.json cannot be read: .*{key}"):
            Progress.read(tmp_path)
