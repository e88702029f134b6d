"""MLflow holds more of a run than metrics: data, a table of completions, traces with feedback, machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.contexts import context_of, scored
from support.mlflow_store import TrackedRun

from grpox.checkpoint.resume import fingerprints
from grpox.contracts import Episode, Rollout, RunContext, ScoredRollout, ToolCall, ToolResult, Turn
from grpox_mlflow.configs import MlflowConfig
from grpox_mlflow.contents import completions_table, dataset_inputs, datasets_of, table_text
from grpox_mlflow.lines import BYTES_PER_REQUEST, in_requests
from grpox_mlflow.sync import sync
from grpox_mlflow.traces import TEXT_LENGTH, TracedRollouts, recorded_traces, trace_id


def row_of(place: int, reward: float = 0.5, completion: str = "2") -> ScoredRollout:
    fields: Any = {"rewards": {"math": reward, "short": None}, "extra": {"parsed": "two"}}
    fields["rollout"] = Rollout(place // 4, place % 4, (1, 5, 6), (2, 3), "stop", 7)
    return scored(reward, completion, f"1+{place}=", columns={"answer": 1 + place}, **fields)


BATCH = [row_of(place, reward=place / 10) for place in range(8)]


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "2+2=", "answer": 4}\n')
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "3+3=", "answer": 6}\n')
    data, heldout = ({"path": str(tmp_path / name)} for name in ("train.jsonl", "heldout.jsonl"))
    context = context_of(tmp_path / "run", data=data, evaluation=heldout)
    return replace(context, fingerprints=fingerprints(context.config))


def follow(run: RunContext, store: str, **config: Any) -> TrackedRun:
    """Begin a run in an experiment of its own."""
    return TrackedRun(run, store, experiment=run.output_dir.parent.name, **config).start()


def take_step(followed: TrackedRun, step: int, rollouts: Sequence[ScoredRollout] = BATCH) -> None:
    followed.score(step, rollouts)
    followed.step(step, {"reward": 0.5, "time/generate": 3.0, "time/reward": 1.0})


def traces(followed: TrackedRun) -> list[Any]:
    experiment = followed.stored.info.experiment_id
    found = followed.client.search_traces(locations=[experiment], include_spans=True)
    return sorted(found, key=lambda trace: (trace.info.tags["grpox.step"], trace.info.trace_id))


def test_a_run_has_its_data_a_table_and_traces(run: RunContext, store: str) -> None:
    followed = follow(run, store, traces=2)
    for step in (1, 2):
        take_step(followed, step)
    followed.tracker.grpox_evaluated()
    system = run.output_dir / "system" / "node_0.jsonl"
    system.parent.mkdir()
    system.write_text('{"step": 0, "time": 5.5, "metrics": {"system/cpu_utilization_percentage": 12.5}}\n')
    followed.finish()
    stored = followed.stored

    inputs = {entry.tags[0].value: entry.dataset for entry in stored.inputs.dataset_inputs}
    assert inputs.keys() == {"train", "eval"}
    train = inputs["train"]
    assert (train.name, train.digest) == ("train.jsonl", run.fingerprints["data.path"][:32])
    assert json.loads(train.source) == {"uri": (run.output_dir.parent / "train.jsonl").as_uri()}
    assert [column["name"] for column in json.loads(train.schema)["mlflow_colspec"]] == ["prompt", "answer"]
    assert json.loads(train.profile) == {"num_rows": 2}
    assert inputs["eval"].digest == run.fingerprints["evaluation.path"][:32]
    name = "system/cpu_utilization_percentage"
    [value] = followed.client.get_metric_history(stored.info.run_id, name)
    assert (value.value, value.step, value.timestamp) == (12.5, 0, 5500)
    _the_table_is_one(followed)
    _traces_have_spans_and_feedback(followed)
    before = [trace.info.trace_id for trace in traces(followed)]
    again = sync(run.output_dir)
    assert (again.values, again.files) == (0, 0)
    assert [trace.info.trace_id for trace in traces(followed)] == before


def _the_table_is_one(followed: TrackedRun) -> None:
    logged = json.loads(followed.stored.data.tags["mlflow.loggedArtifacts"])
    assert logged == [{"path": "eval_table.json", "type": "table"}]
    table = json.loads(followed.artifact("eval_table.json").read_text())
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert len(table["data"]) == 16
    assert (first["batch"], first["prompt"], first["completion"]) == ("step 1", "1+7=", "2")
    assert (first["reward"], first["rewards/math"], first["rewards/short"]) == (0.7, 0.7, None)
    assert (first["extra/parsed"], first["data/answer"]) == ("two", "8")


def _traces_have_spans_and_feedback(followed: TrackedRun) -> None:
    found = traces(followed)
    assert [trace.info.tags["grpox.step"] for trace in found] == ["1", "1", "2", "2"]
    trace = found[0]
    assert trace.info.trace_metadata["mlflow.sourceRun"] == followed.stored.info.run_id
    assert trace.info.execution_duration == 4000
    assert json.loads(trace.info.trace_metadata["mlflow.trace.tokenUsage"])["total_tokens"] == 5
    spans = {span.name: span for span in trace.data.spans}
    assert spans.keys() == {"rollout", "generate", "rewards/math", "rewards/short"}
    root, generate, reward = spans["rollout"], spans["generate"], spans["rewards/math"]
    assert root.parent_id is None
    assert generate.parent_id == reward.parent_id == root.span_id
    assert generate.inputs.startswith("1+")
    assert generate.outputs == "2"
    assert round((generate.end_time_ns - generate.start_time_ns) / 1e9, 3) == 3.0
    assert reward.start_time_ns == generate.end_time_ns
    feedback = {given.name: given.feedback.value for given in trace.info.assessments}
    assert feedback.keys() == {"reward", "rewards/math"}
    assert feedback["reward"] == feedback["rewards/math"] == reward.outputs


def test_a_run_that_goes_back_makes_no_trace_twice(run: RunContext, store: str) -> None:
    first = follow(run, store, traces=1)
    for step in (1, 2):
        take_step(first, step)
    first.fail(ValueError("odd"))
    before = {trace.info.trace_id for trace in traces(first)}
    lines = (run.output_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    resumed = follow(replace(run, resumed_at=1, metrics_bytes=len(lines[0])), store, traces=1)
    for step in (2, 3):
        take_step(resumed, step)
    resumed.finish()
    found = traces(resumed)
    assert before < {trace.info.trace_id for trace in found}
    assert [trace.info.tags["grpox.step"] for trace in found] == ["1", "2", "3"]
    assert {len(trace.info.assessments) for trace in found} == {2}
    assert {len(trace.data.spans) for trace in found} == {4}


def test_the_draw_is_the_same_each_time_and_another_in_each_step(tmp_path: Path) -> None:
    def drawn(folder: Path, *steps: int) -> list[tuple[int, int]]:
        folder.mkdir()
        traced = TracedRollouts(folder, 2, seed=3)
        for step in steps:
            traced.draw(step, BATCH)
            traced.write({})
        lines = map(json.loads, (folder / "traces.jsonl").read_text().splitlines())
        return [(line["step"], line["row"]) for line in lines]

    whole = drawn(tmp_path / "a", 1, 2, 3, 4)
    assert drawn(tmp_path / "b", 3, 4) == whole[4:]
    rows = [tuple(row for step, row in whole if step == wanted) for wanted in (1, 2, 3, 4)]
    assert all(len(set(drawn_rows)) == 2 for drawn_rows in rows)
    assert len(set(rows)) > 1


def test_two_batches_of_one_step_have_traces_of_their_own_as_json_takes_them(tmp_path: Path) -> None:
    traced = TracedRollouts(tmp_path, 8, seed=0)
    odd = row_of(0, reward=math.nan, completion="x" * (TEXT_LENGTH + 5))
    traced.draw(1, BATCH)
    traced.draw(1, [odd, *BATCH[1:]])
    traced.write({"time/reward": 2.0})
    found = [each for piece, _ in recorded_traces(tmp_path).pieces() for each in piece]
    assert len({trace_id("run", each) for each in found}) == len(found) == 16
    assert {each["seconds"]["reward"] for each in found} == {2.0}
    (told,) = [each for each in found if each["batch"] == 2 and each["row"] == 0]
    assert told["reward"] is told["rewards"]["math"] is None
    assert "[... 5 characters ...]" in told["completion"]


def test_a_line_that_was_cut_off_is_left_and_one_of_rubbish_passed_over(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n{"st')
    recorded = recorded_traces(tmp_path)
    [(found, end)] = recorded.pieces()
    assert [each["step"] for each in found] == [1, 2]
    assert recorded.position == end
    assert list(recorded.pieces()) == []
    traced = TracedRollouts(tmp_path, 1, seed=0)  # of the resumed run
    traced.draw(3, BATCH)
    traced.write({})
    [(found, _)] = recorded.pieces()
    assert [each["step"] for each in found] == [3]


def test_data_without_a_file_are_described_by_the_run_file(run: RunContext) -> None:
    def of(**data: Any) -> dict[str, str]:
        return datasets_of(context_of(run.output_dir, data=data))[0]

    hub = of(path="org/set", subset="main")
    assert (hub["name"], hub["source_type"]) == ("org/set", "hugging_face")
    assert json.loads(hub["source"]) == {"path": "org/set", "split": "train", "config_name": "main"}
    assert hub["digest"] != of(path="org/set", subset="main", split="test")["digest"]
    plugin = of(source={"name": "mine", "api_key": "hush"})
    assert (plugin["name"], plugin["source_type"]) == ("mine", "component")
    assert "hush" not in str(plugin)
    same = run.config.model_copy(deep=True)
    assert same.evaluation is not None
    same.evaluation.path = str(same.data.path)
    told = datasets_of(replace(run, config=same, fingerprints=fingerprints(same)))
    assert [each["name"] for each in told] == ["train.jsonl", "train.jsonl (eval)"]
    assert told[0]["digest"] == told[1]["digest"]
    assert len({(entry.dataset.name, entry.tags[0].value) for entry in dataset_inputs(told)}) == 2


def test_a_table_has_every_column_and_null_where_a_row_has_none(tmp_path: Path) -> None:
    told = json.loads(table_text([{"a": 1, "b": math.nan}, {"a": 2, "c": "ü"}]))
    assert told == {"columns": ["a", "b", "c"], "data": [[1, None, None], [2, None, "ü"]]}
    assert completions_table(tmp_path) is None


def test_requests_are_cut_by_number_and_by_size() -> None:
    from mlflow.entities import Metric, Param

    metrics = [Metric(f"m{number}", 1.0, 0, 0) for number in range(2500)]
    assert [len(batch) for batch in in_requests(metrics, 1000)] == [1000, 1000, 500]
    params = [Param(f"p{number}", "ü" * 6000) for number in range(100)]
    batches = list(in_requests(params, 100))
    assert [param for batch in batches for param in batch] == params
    for batch in batches:
        assert len(json.dumps([[param.key, param.value] for param in batch])) <= BYTES_PER_REQUEST
    assert list(in_requests([], 100)) == []


def test_a_name_that_no_registered_model_can_have_is_refused() -> None:
    for name in ("", " ", "a/b", "a:b", "50%", "it's", "a  b", "x" * 300, "..", " a"):
        with pytest.raises(ValidationError):
            MlflowConfig(register_as=name)
    for usual in ("adder", "qwen2.5-math_v1", "My model"):
        assert MlflowConfig(register_as=usual).register_as == usual


def episode() -> ScoredRollout:
    """Two turns, of which the first calls two tools; the second of these fails."""
    messages = (
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": "ask"},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "look", "content": "x" * (TEXT_LENGTH + 5)},
        {"role": "assistant", "content": "it is 3"},
    )
    results = (
        ToolResult(ToolCall("add", '{"a": 1}'), "3", "", 0.5, 0),
        ToolResult(ToolCall("look", "{"), "bad arguments", "arguments", 0.0, 0),
    )
    times: Any = {"info": {"success": True}, "times": ((0.0, 1.0), (1.5, 2.0))}
    conversation = Episode("calculator", messages, results, rewards={"": 1.0}, **times)
    turns = (Turn(0, 1, "stop", 7, 0.5), Turn(2, 3, "stop", 7))
    mask = (True, False, True)
    rollout = Rollout(0, 0, (1, 5, 6), (2, 3, 4), "done", 7, None, mask, turns, {}, conversation)
    return scored(1.0, "ask3it is 3", "1+2=", rollout=rollout, rewards={"environment": 1.0})


def test_the_trace_of_an_episode_has_a_span_for_each_turn_and_each_call(run: RunContext, store: str) -> None:
    followed = follow(run, store, traces=1)
    take_step(followed, 1, [episode()])
    followed.finish()
    (trace,) = traces(followed)
    spans = {span.name: span for span in trace.data.spans}
    calls = ["tool add 0", "tool look 1"]
    assert spans.keys() == {"rollout", "turn 0", *calls, "turn 1", "rewards/environment"}
    root = spans["rollout"]
    assert root.outputs["completion"][-1] == {"role": "assistant", "content": "it is 3"}
    assert root.outputs["info"] == {"success": True}
    assert {span.parent_id for span in trace.data.spans if span is not root} == {root.span_id}

    def seconds(name: str) -> tuple[float, float]:
        span = spans[name]
        begin = root.start_time_ns
        return round((span.start_time_ns - begin) / 1e9, 3), round((span.end_time_ns - begin) / 1e9, 3)

    assert [seconds(name) for name in ("turn 0", *calls, "turn 1")] == [(0, 1), (1, 1.5), (1, 1), (1.5, 2)]
    assert spans["turn 0"].inputs == ["1+2=", {"role": "user", "content": "begin"}]
    assert spans["turn 0"].outputs == {"role": "assistant", "content": "ask"}
    assert spans["turn 0"].attributes["reward"] == 0.5
    assert [message["role"] for message in spans["turn 1"].inputs] == ["tool", "tool"]
    assert len(spans["turn 1"].inputs[1]["content"]) < TEXT_LENGTH
    assert (spans[calls[0]].inputs["name"], spans[calls[0]].outputs) == ("add", "3")
    assert spans[calls[0]].status.status_code.name == "OK"
    failed = spans[calls[1]].status
    assert (failed.status_code.name, failed.description) == ("ERROR", "arguments")
