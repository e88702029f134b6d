"""The local record reads back as what was told, byte for byte where that matters."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from pyarrow import parquet
from rich.console import Console
from support.contexts import context_of, scored
from support.frozen import answers_of
from support.logs import LoggedText
from support.patience import patient

from grpox.config import RunConfig
from grpox.contracts import Episode, Rollout, RunContext, ScoredRollout, ToolCall, ToolResult, Turn
from grpox.observing.conversation import ends, speeches
from grpox.observing.display import _sample_table
from grpox.observing.machine_metrics import Readings, machine_metrics
from grpox.observing.page.data import MOST_MESSAGES, read_samples
from grpox.observing.record import LocalRecord, sync_record, versions
from grpox.observing.record_files import MOST_OF_ANSWER, write_completions
from grpox.observing.token_files import token_file
from grpox.runtime.files import write_atomically


def context(folder: Path, **logging: int) -> RunContext:
    sections = {
        "model": {"path": "models/ü"},
        "rewards": ["math", {"path": "rewards.py:short", "weight": 0.5, "limit": 3}],
        "loss": {"name": "dapo", "clip_high": 0.28},
        "train": {"learning_rate": 1e-6},
        "logging": logging,
    }
    return replace(context_of(folder / "deep" / "run", world_size=2, **sections), git_commit="abc123")


def row_of(sample: int, **rewards: float | None) -> ScoredRollout:
    rollout = Rollout(0, sample, (1, 2), (3, 4, 5), "length", policy_version=7)
    return scored(0.5, "is\n2 ✓", "1+1=", rollout=rollout, rewards=rewards, advantage=-1.25)


def table_of(run: RunContext, name: str = "step_000001") -> Any:
    return parquet.read_table(run.output_dir / "completions" / f"{name}.parquet")


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return context(tmp_path)


@pytest.fixture
def record(run: RunContext) -> LocalRecord:
    record = LocalRecord()
    record.grpox_run_started(run)
    return record


@pytest.mark.usefixtures("record")
def test_config_and_versions_read_back_as_they_were(run: RunContext) -> None:
    text = (run.output_dir / "config.yaml").read_text(encoding="utf-8")
    assert RunConfig.model_validate(yaml.safe_load(text)) == run.config
    installed = versions(["pytest", "grpox-of-nobody"])  # one that is not installed has none
    assert (installed["pytest"], "grpox-of-nobody" in installed) == (pytest.__version__, False)
    facts = {"git_commit": "abc123", "total_steps": 10, "world_size": 2, "source": "run.yaml"}
    written = json.loads((run.output_dir / "versions.json").read_text())
    assert written == {"versions": {"grpox": "0.1.0"}, **facts}


def test_metrics_are_strict_json_with_every_digit_at_once(run: RunContext, record: LocalRecord) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    before = time.time()
    record.grpox_step_finished(1, {"loss": 0.1 + 0.2, "kl": math.nan, "low": -math.inf, "high": math.inf})
    record.grpox_evaluated(1, {"accuracy": 0.25})
    lines = (run.output_dir / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    values = {"loss": 0.30000000000000004, "kl": "nan", "low": "-inf", "high": "inf"}
    assert (first["step"], first["metrics"]) == (1, values)
    assert (second["step"], second["evaluation"]) == (1, {"accuracy": 0.25})
    assert before <= first["time"] <= second["time"] <= time.time()


def test_a_second_run_sets_the_record_of_the_first_aside(run: RunContext, record: LocalRecord) -> None:
    record.grpox_step_finished(1, {"loss": 1.0})
    record.grpox_rollouts_scored(1, [row_of(0, math=1.0)])
    (run.output_dir / "summary.json").write_text("{}")
    (run.output_dir / "model").mkdir()
    (run.output_dir / "report.html").write_text("first")
    record.grpox_run_failed(run, ValueError("first ✗"))
    again = LocalRecord()
    again.grpox_run_started(run)
    again.grpox_step_finished(1, {"loss": 2.0})
    (aside,) = (run.output_dir / "earlier").iterdir()
    names = {"config.yaml", "versions.json", "metrics.jsonl", "completions", "summary.json"}
    names |= {"failure.json", "report.html", "model"}
    assert {path.name for path in aside.iterdir()} == names
    failure = json.loads((aside / "failure.json").read_text(encoding="utf-8"))
    assert failure == {"error": "ValueError: first ✗"}
    assert not (run.output_dir / "model").exists()
    assert not (run.output_dir / "summary.json").exists()
    # Runs that end in the same second are set aside apart.
    for loss in (2.0, 3.0, 4.0):
        os.utime(run.output_dir / "metrics.jsonl", (1.7e9, 1.7e9))
        again = LocalRecord()
        again.grpox_run_started(run)
        again.grpox_step_finished(1, {"loss": loss + 1})
    ended = time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(1.7e9))
    folders = [aside, *(aside.with_name(f"{ended}{end}") for end in ("", "-2", "-3")), run.output_dir]
    assert {path.name for path in aside.parent.iterdir()} == {folder.name for folder in folders[:-1]}
    lines = [json.loads((folder / "metrics.jsonl").read_text()) for folder in folders]
    assert [line["metrics"]["loss"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 5.0]


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
    record.grpox_run_failed(run, KeyboardInterrupt())
    LocalRecord().grpox_run_started(run)
    (aside,) = (run.output_dir / "earlier").iterdir()
    assert json.loads((aside / "failure.json").read_text()) == {"error": "KeyboardInterrupt"}
    assert {path.name for path in aside.iterdir()} == {"config.yaml", "versions.json", "failure.json"}


def test_columns_of_data_and_values_of_rewards_are_saved(run: RunContext, record: LocalRecord) -> None:
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"answer": 5, "level": 1, "tests": [{"in": math.nan}, "é"], "when": date(2026, 1, 2)},
            {"steps": 3, "why": "no carry", "gold": 10**30},
        ),
        (
            {"answer": "five", "level": None, "tests": {}, "when": None},
            {"steps": None, "why": ["a", 1], "gold": 7},
        ),
        ({}, {"odd": "a\ud800"}),
    ]
    rows = [replace(row_of(0, math=1.0), columns=columns, extra=extra) for columns, extra in saved]
    record.grpox_rollouts_scored(1, rows)
    table = table_of(run).to_pydict()
    assert {name: values for name, values in table.items() if name.startswith(("data/", "extra/"))} == {
        "data/answer": ["5", "five", None],  # a column has one type
        "data/level": [1, None, None],
        "data/tests": ['[{"in": "nan"}, "é"]', "{}", None],
        "data/when": ["2026-01-02", None, None],
        "extra/steps": [3, None, None],
        "extra/why": ["no carry", "['a', 1]", None],
        "extra/gold": [str(10**30), "7", None],  # beyond what a column of numbers holds
        "extra/odd": [None, None, "a\\ud800"],
    }


def test_completions_read_back_with_a_column_per_reward(run: RunContext, record: LocalRecord) -> None:
    record.grpox_rollouts_scored(5, [row_of(0, math=1.0, short=None), row_of(1, math=0.0, short=0.5)])
    table = table_of(run, "step_000005")
    expected = {
        "step": 5, "group": 0, "sample": 0, "prompt": "1+1=", "completion": "is\n2 ✓", "reward": 0.5,
        "advantage": -1.25, "rewards/math": 1.0, "rewards/short": None, "finish_reason": "length",
        "policy_version": 7, "completion_length": 3,
    }  # fmt: skip
    assert list(table.to_pylist()[0].items()) == list(expected.items())
    assert table["rewards/short"].to_pylist() == [None, 0.5]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 3, 5]), (2, [1, 5]), (0, [])])
def test_completions_are_saved_every_few_batches(tmp_path: Path, every: int, steps: list[int]) -> None:
    run = context(tmp_path, save_completions_every=every)
    record = LocalRecord()
    record.grpox_run_started(run)
    for step in (1, 3, 5):
        record.grpox_rollouts_scored(step, [row_of(0, math=1.0)])
    files = sorted(path.name for path in run.output_dir.glob("completions/*"))
    assert files == [f"step_{step:06d}.parquet" for step in steps]


def test_two_generation_batches_of_one_step_have_a_file_each(run: RunContext, record: LocalRecord) -> None:
    for reward, name in ((1.0, "step_000001"), (0.0, "step_000001_2")):
        record.grpox_rollouts_scored(1, [row_of(0, math=reward)])
        assert table_of(run, name)["rewards/math"].to_pylist() == [reward]


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
    assert logged().startswith(f"warning: {metrics} has {size} bytes, and had {len(whole)} when ")


def test_a_resume_undoes_later_steps(run: RunContext, record: LocalRecord, logged: LoggedText) -> None:
    record.grpox_step_finished(1, {"loss": 1.0})
    size = (run.output_dir / "metrics.jsonl").stat().st_size
    record.grpox_step_finished(2, {"loss": 1.0})
    for step in (1, 2):
        write_atomically(token_file(run.output_dir, step), "tokens")
    LocalRecord().grpox_run_started(replace(run, resumed_at=1, metrics_bytes=size))
    assert (lines_of(run), lines_of(run, "metrics.undone.jsonl")) == ([1], [2])
    assert [path.name for path in (run.output_dir / "tokens").iterdir()] == ["step_000001.parquet"]
    assert logged() == ""
    LocalRecord().grpox_run_started(run)  # another run in the same folder
    assert not (run.output_dir / "tokens").exists()


def test_a_record_is_on_the_disk(run: RunContext, record: LocalRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        record.grpox_rollouts_scored(step, [row_of(0, math=1.0)])
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


# -- Episodes --------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 37, "b": 68}'}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Begin."},
    {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "<b>105</b>"},
    {"role": "assistant", "content": "It is 105."},
)
TURNS = (Turn(0, 2, "stop", 3, reward=0.5, state_key="s"), Turn(4, 6, "stop", 3))
MASK = (True, True, False, False, True, True)


def episode(messages: Any = MESSAGES, **fields: Any) -> ScoredRollout:
    given = {"rewards": {"right": 1.0}, "info": {"success": True, "calls": 1}, **fields}
    result = ToolResult(ToolCall("add", '{"a": 37, "b": 68}'), "<b>105</b>", "", 0.25, 0)
    conversation = Episode("calculator", tuple(messages), (result,), times=((0.0, 1.0), (1.5, 2.0)), **given)
    rollout = Rollout(0, 0, (1,), (2, 3, 4, 5, 6, 7), "done", 3, None, MASK, TURNS, {}, conversation)
    return scored(1.0, "I ask.105It is 105.", "37+68=", rollout=rollout, rewards={"environment": 1.0})


def single() -> ScoredRollout:
    rollout = Rollout(0, 1, (1,), (2, 3), "length", 3)
    return scored(0.0, "95", "37+68=", rollout=rollout, rewards={"environment": None})


def columns_of(folder: Path, *rollouts: ScoredRollout) -> list[dict[str, Any]]:
    """Write completions to a file, and return its rows."""
    write_completions(folder / "step.parquet", 1, rollouts)
    rows: list[dict[str, Any]] = parquet.read_table(folder / "step.parquet").to_pylist()
    return rows


def folder(path: Path, *rollouts: ScoredRollout, metrics: dict[str, float] | None = None) -> Path:
    write_completions(path / "completions" / "step_000001.parquet", 1, rollouts)
    lines = [
        {"step": 1, "time": 5.0, "metrics": {"reward": 0.5, **(metrics or {})}},
        {"step": 1, "time": 6.0, "evaluation": {"accuracy": 0.25, "success": 0.75}},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_parquet_holds_the_conversation_and_what_the_environment_said(tmp_path: Path) -> None:
    lost = episode(rewards=None, info={}, lost="killed by signal 9")
    first, second, third = columns_of(tmp_path, episode(), lost, single())
    assert json.loads(first["messages"]) == list(MESSAGES)
    assert json.loads(first["turns"])[0] == vars(TURNS[0])
    assert json.loads(first["tool_calls"]) == [
        {"turn": 0, "name": "add", "arguments": '{"a": 37, "b": 68}', "content": "<b>105</b>", "failure": ""}
    ]  # without seconds, so that two runs of one seed have the same record
    assert json.loads(first["environment_rewards"]) == {"right": 1.0}
    assert json.loads(first["info"]) == {"success": True, "calls": 1}
    assert (first["environment"], first["environment_error"]) == ("calculator", None)
    assert (first["completion_length"], first["model_length"]) == (6, 4)
    assert (second["environment_rewards"], second["environment_error"]) == (None, "killed by signal 9")
    assert (third["model_length"], third["turns"]) == (2, "[]")
    others = ("environment", "environment_error", "messages", "tool_calls", "environment_rewards", "info")
    assert [third[name] for name in others] == [None] * 6


def test_an_answer_is_recorded_up_to_a_limit_and_half_of_a_surrogate_pair_escaped(tmp_path: Path) -> None:
    odd = episode([{"role": "assistant", "content": "\ud83d"}], failure="\ud83d")
    assert odd.rollout.episode is not None
    result = replace(odd.rollout.episode.results[0], content="7" * (MOST_OF_ANSWER + 1234))
    rollout = replace(odd.rollout, episode=replace(odd.rollout.episode, results=(result,)))
    (row,) = columns_of(tmp_path, replace(odd, rollout=rollout))
    (call,) = json.loads(row["tool_calls"])
    assert call["content"] == "7" * MOST_OF_ANSWER + "... (1,234 further characters)"
    assert row["environment_error"] == "\\ud83d"
    assert "\\ud83d" in row["messages"]


SPEECHES = [
    ("user", "Begin."),
    ("assistant", 'I ask.\nadd({"a": 37, "b": 68})'),
    ("tool add", "<b>105</b>"),
    ("assistant", "It is 105."),
]


def test_speeches_name_tools_and_write_calls_and_a_list_is_cut_in_its_middle() -> None:
    assert speeches(MESSAGES) == SPEECHES
    odd: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {}}]},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "tool", "content": ""},
    ]
    assert speeches(odd) == [("assistant", "look({})"), ("user", "one two"), ("tool", "")]
    assert ends([1, 2, 3], 3) == ([1, 2, 3], 0, ())
    assert ends([1, 2, 3, 4, 5, 6], 4) == ([1, 2], 2, [5, 6])
    assert ends([1, 2, 3, 4, 5, 6], 3) == ([1], 3, [5, 6])


def test_the_report_holds_who_says_what(tmp_path: Path) -> None:
    metrics = {"tools/add/calls": 3.0, "turns/mean": 2.0, "episodes/success": 0.5, "info/calls": 1.0}
    answers = answers_of(folder(tmp_path, episode(), single(), metrics=metrics))
    first, second = answers["completions"]["rows"]
    assert first["messages"] == [list(speech) for speech in SPEECHES]
    assert (second["messages"], second["completion"]) == ([], "95")  # one turn, as ever
    facts = [(row["tokens"], row["turns"], row["finish_reason"]) for row in (first, second)]
    assert facts == [(4, 2, "done"), (2, 0, "length")]
    assert first["extra"]["info"] == '{"success": true, "calls": 1}'
    assert ["success", "0.75"] in [tile[:2] for tile in answers["run"]["tiles"]]
    assert metrics.keys() <= answers["metrics"]["series"].keys()


def test_the_report_cuts_a_long_conversation_in_its_middle(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"message {number}"} for number in range(MOST_MESSAGES + 5)]
    batches, _ = read_samples(folder(tmp_path, episode(messages)))
    conversation = batches[0].rows[0]["messages"]
    assert len(conversation) == MOST_MESSAGES + 1
    assert conversation[MOST_MESSAGES // 2] == ["", "[... 5 messages ...]"]
    assert conversation[-1][1] == f"message {MOST_MESSAGES + 4}"


def test_the_report_reads_what_another_program_wrote_into_the_columns(tmp_path: Path) -> None:
    run = folder(tmp_path, episode())
    path = run / "completions" / "step_000001.parquet"
    table = parquet.read_table(path)
    for text in ("{", '{"a": 1}', "[1, [2]]"):
        odd = table.set_column(table.schema.get_field_index("messages"), "messages", [[text]])
        parquet.write_table(odd, path)
        (row,) = answers_of(run)["completions"]["rows"]
        assert (row["completion"], row["messages"]) == ("I ask.105It is 105.", [])


def test_the_terminal_shows_a_line_for_each_message() -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    long = [*MESSAGES, *({"role": "user", "content": f"no {number}"} for number in range(6))]
    console.print(_sample_table(1, [episode(), single(), episode(long)]))
    shown = console.export_text()
    # A line break within a message stays escaped.
    for text in ("user: Begin.", "assistant: I ask.\\nadd({", "tool add: <b>105</b>", "95", "user: no 5"):
        assert text in shown
    assert "... 4 messages ..." in shown
    assert "user: no 2" not in shown


# -- Metrics of the machine, once per machine, which never delay a run ------------------------------------

EXPECTED = {
    "cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage",
    "disk_usage_percentage", "disk_usage_megabytes", "disk_available_megabytes",
    "network_receive_megabytes", "network_transmit_megabytes",
}  # fmt: skip


def ranks(rank: int, *machines: str) -> Any:
    """The ranks of a run on machines of these names, as one of them sees them."""
    return Mock(rank=rank, gather=Mock(return_value=[*machines]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("rank", "node"), [(0, "node_0"), (1, None), (2, "node_1"), (3, None)])
def test_the_first_rank_of_each_machine_reads_it(tmp_path: Path, rank: int, node: str | None) -> None:
    with machine_metrics(tmp_path, 60, ranks(rank, "a", "a", "b", "b")):
        pass
    files = list(tmp_path.glob("system/*"))
    assert [path.name for path in files] == ([f"{node}.jsonl"] if node else [])
    assert all(f"system/{node}/cpu_utilization_percentage" in lines(path)[0]["metrics"] for path in files)


def test_the_names_are_mlflows_and_a_process_that_goes_on_counts_on(tmp_path: Path) -> None:
    path, alone = tmp_path / "system" / "node_0.jsonl", ranks(0, "a")
    for every, steps in ((0, []), (60, [0]), (60, [0, 1])):
        with machine_metrics(tmp_path, every, alone):
            pass
        assert [line["step"] for line in (lines(path) if path.exists() else [])] == steps
    assert alone.gather.call_count == 2  # nothing is asked where it is off
    first, second = lines(path)
    assert first["time"] <= second["time"]
    assert {f"system/{name}" for name in EXPECTED} <= first["metrics"].keys()
    assert 0 <= first["metrics"]["system/system_memory_usage_percentage"] <= 100
    assert first["metrics"]["system/disk_available_megabytes"] > 0


def test_what_cannot_be_read_or_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no")

    readings = Readings(tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", refused)
    taken = readings.take()
    assert "system_memory_usage_percentage" not in taken
    assert "disk_usage_percentage" in taken
    (tmp_path / "system").write_text("in the way")
    with machine_metrics(tmp_path, 60, ranks(0, "a")):
        pass


def test_a_gpu_is_read_where_its_library_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, rates = SimpleNamespace(used=2e9, total=8e9), SimpleNamespace(gpu=37)
    library: Any = SimpleNamespace(  # one GPU whose power cannot be read
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: memory,
        nvmlDeviceGetUtilizationRates=lambda handle: rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    taken = Readings(tmp_path).take()
    gpu = {name: value for name, value in taken.items() if name.startswith("gpu_")}
    assert gpu == {
        "gpu_0_memory_usage_percentage": 25.0, "gpu_0_memory_usage_megabytes": 2000.0,
        "gpu_0_utilization_percentage": 37.0,
    }  # fmt: skip


def test_without_that_library_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '0, 1000, 4000, 37, 80.5, [N/A]'\necho '1, 0, 4000, 0, 50, 200'\n")
    command.chmod(0o755)
    taken = Readings(tmp_path).take()
    assert {name: value for name, value in taken.items() if name.startswith("gpu_0")} == {
        "gpu_0_memory_usage_percentage": 25.0, "gpu_0_memory_usage_megabytes": 1048.576,
        "gpu_0_utilization_percentage": 37.0, "gpu_0_power_usage_watts": 80.5,
    }  # fmt: skip
    assert taken["gpu_1_power_usage_percentage"] == 25.0
    command.write_text("#!/bin/sh\nexit 9\n")
    assert "gpu_0_utilization_percentage" not in Readings(tmp_path).take()


def test_the_cpu_is_read_by_the_thread_that_was_asked_before(tmp_path: Path) -> None:
    """psutil answers the first question of each thread with 0."""
    path = tmp_path / "system" / "node_0.jsonl"
    end = time.monotonic() + patient(60)
    with machine_metrics(tmp_path, 0.2, ranks(0, "a")):
        while not (path.exists() and lines(path)) and time.monotonic() < end:
            sum(range(10_000))  # so that there is something to read
    assert lines(path)[0]["metrics"]["system/cpu_utilization_percentage"] > 0
