"""The record of episodes: parquet, the report and the terminal show the conversation as it went."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import parquet
from rich.console import Console
from support.frozen import answers_of

from grpox.contracts import Episode, Rollout, ScoredRollout, ToolCall, ToolResult, Turn
from grpox.observing.conversation import ends, speeches
from grpox.observing.display import _sample_table
from grpox.observing.page.data import MOST_MESSAGES, read_samples
from grpox.observing.record_files import MOST_OF_ANSWER, write_completions

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
    return ScoredRollout(rollout, "37+68=", "I ask.105It is 105.", {"environment": 1.0}, 1.0, 0.5)


def single() -> ScoredRollout:
    rollout = Rollout(0, 1, (1,), (2, 3), "length", 3)
    return ScoredRollout(rollout, "37+68=", "95", {"environment": None}, 0.0, -0.5)


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
    write_completions(tmp_path / "step.parquet", 1, [episode(), lost, single()])
    first, second, third = parquet.read_table(tmp_path / "step.parquet").to_pylist()
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
    assert third["model_length"] == 2
    assert third["turns"] == "[]"
    others = ("environment", "environment_error", "messages", "tool_calls", "environment_rewards", "info")
    assert [third[name] for name in others] == [None] * 6


def test_an_answer_of_any_length_is_recorded_up_to_a_limit(tmp_path: Path) -> None:
    long = episode()
    assert long.rollout.episode is not None
    result = replace(long.rollout.episode.results[0], content="7" * (MOST_OF_ANSWER + 1234))
    rollout = replace(long.rollout, episode=replace(long.rollout.episode, results=(result,)))
    write_completions(tmp_path / "step.parquet", 1, [replace(long, rollout=rollout)])
    (row,) = parquet.read_table(tmp_path / "step.parquet").to_pylist()
    (call,) = json.loads(row["tool_calls"])
    assert call["content"] == "7" * MOST_OF_ANSWER + "... (1,234 further characters)"


def test_half_of_a_surrogate_pair_is_escaped(tmp_path: Path) -> None:
    odd = episode([{"role": "assistant", "content": "\ud83d"}], failure="\ud83d")
    write_completions(tmp_path / "step.parquet", 1, [odd])
    (row,) = parquet.read_table(tmp_path / "step.parquet").to_pylist()
    assert row["environment_error"] == "\\ud83d"
    assert "\\ud83d" in row["messages"]


def test_speeches_name_tools_and_write_calls() -> None:
    assert speeches(MESSAGES) == [
        ("user", "Begin."),
        ("assistant", 'I ask.\nadd({"a": 37, "b": 68})'),
        ("tool add", "<b>105</b>"),
        ("assistant", "It is 105."),
    ]
    odd: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {}}]},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "tool", "content": ""},
    ]
    assert speeches(odd) == [("assistant", "look({})"), ("user", "one two"), ("tool", "")]


def test_the_ends_of_a_list_are_its_first_and_last_items() -> None:
    assert ends([1, 2, 3], 3) == ([1, 2, 3], 0, ())
    assert ends([1, 2, 3, 4, 5, 6], 4) == ([1, 2], 2, [5, 6])
    assert ends([1, 2, 3, 4, 5, 6], 3) == ([1], 3, [5, 6])


def test_the_report_holds_who_says_what(tmp_path: Path) -> None:
    metrics = {"tools/add/calls": 3.0, "turns/mean": 2.0, "episodes/success": 0.5, "info/calls": 1.0}
    run = folder(tmp_path, episode(), single(), metrics=metrics)
    answers = answers_of(run)
    first, second = answers["completions"]["rows"]
    assert first["messages"] == [
        ["user", "Begin."],
        ["assistant", 'I ask.\nadd({"a": 37, "b": 68})'],
        ["tool add", "<b>105</b>"],
        ["assistant", "It is 105."],
    ]
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
    assert "user: Begin." in shown
    assert "assistant: I ask.\\nadd({" in shown  # a line break within a message stays escaped
    assert "tool add: <b>105</b>" in shown
    assert "95" in shown
    assert "... 4 messages ..." in shown
    assert "user: no 5" in shown
    assert "user: no 2" not in shown
