"""Rollouts as MLflow's traces: drawn from each generation batch, saved in the run's folder, shipped from there.

MLflow accepts about thirteen traces per second, so only some rollouts are drawn. A trace has spans for
generation and each reward, and the rewards as feedback; that of an episode has a span for each turn of the
model and each call of a tool instead of one for generation. Its id depends only on its run, step and row: a
request may therefore be repeated, and a resumed run creates no duplicates.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox_mlflow.lines import RecordedLines
from grpox_mlflow.naming import NAME_LENGTH

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo

    from grpox.contracts import Episode, ScoredRollout, Turn

FILE = "traces.jsonl"
TEXT_LENGTH = 20_000
"""Largest number of characters of a prompt or completion."""
PER_PIECE = 20
"""Number of traces written before the metrics are shipped again."""
_PREVIEW = 1000
"""Characters of prompt and completion in the list of traces."""
MOST_SPANS = 100
"""Largest number of turns, of messages and of calls of an episode's trace."""
_LEAST_TEXT = 400
"""Characters of each message that are saved however long the conversation is."""

Trace = Mapping[str, Any]
"""A line of ``traces.jsonl``."""


class TracedRollouts:
    """Appends rollouts to ``traces.jsonl``, one JSON object per rollout.

    Args:
        folder: the run's folder.
        most: number of rollouts drawn from each generation batch; a resumed run draws the same ones.
        seed: the run's seed.
    """

    def __init__(self, folder: Path, most: int, seed: int) -> None:
        self._path = folder / FILE
        self._most, self._seed = most, seed
        self._drawn: list[dict[str, Any]] = []
        self._batches = 0

    def draw(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        """Draw rollouts of a batch that is first used in `step`; they wait here until its times are known."""
        if not self._most or not rollouts:
            return
        now = time.time()
        self._batches += 1
        chance = random.Random(f"{self._seed}/{step}/{self._batches}")
        for row in sorted(chance.sample(range(len(rollouts)), min(self._most, len(rollouts)))):
            record = _record(rollouts[row])
            self._drawn.append({"step": step, "batch": self._batches, "row": row, "time": now, **record})

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append the rollouts drawn, with the seconds of sampling and scoring from the metrics of the step.

        A full disk loses them: traces are only a sample, and the files of completions have all data.
        """
        drawn, self._drawn, self._batches = self._drawn, [], 0
        if not drawn:
            return
        phases = ("generate", "environment", "reward")
        seconds = {name: metrics[f"time/{name}"] for name in phases if f"time/{name}" in metrics}
        lines = [json.dumps({**each, "seconds": seconds}, ensure_ascii=False, default=str) for each in drawn]
        with suppress(OSError), self._path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            torn = file.read(1) not in (b"", b"\n")  # by a kill, or a full disk
            file.write(("\n" * torn + "".join(f"{line}\n" for line in lines)).encode())


def recorded_traces(folder: Path, position: int = 0) -> RecordedLines[Trace]:
    """Read ``traces.jsonl`` in pieces."""
    return RecordedLines(folder / FILE, lambda line: [json.loads(line)], PER_PIECE, position)


def write_traces(uri: str, experiment_id: str, run_id: str, key: str, traces: Sequence[Trace]) -> None:
    """Write traces to the store; traces that it already has are written again.

    Args:
        key: key of the run, which is the same in every store.
    """
    from mlflow.tracing.client import TracingClient

    client = TracingClient(uri)
    spans: list[Span] = []
    for trace in traces:
        client.start_trace(_info(trace, experiment_id, run_id, key))
        spans += _spans(trace, key)
    if spans:
        client.log_spans(experiment_id, spans)


def trace_id(key: str, trace: Trace) -> str:
    """Return an id of the form ``tr-`` and 32 hexadecimal digits."""
    return f"tr-{_digest(key, trace['step'], trace['batch'], trace['row'])}"


def _record(scored: ScoredRollout) -> dict[str, Any]:
    rollout = scored.rollout
    return {
        "group": rollout.group_id,
        "sample": rollout.sample,
        "prompt": _cut(scored.prompt),
        "completion": _cut(scored.completion),
        "reward": _number(scored.reward),
        "rewards": {name: _number(value) for name, value in scored.rewards.items()},
        "advantage": _number(scored.advantage),
        "extra": {
            name: value if isinstance(value, bool | int) else str(value)
            for name, value in {**rollout.extra, **scored.extra}.items()
        },
        **({} if rollout.episode is None else {"episode": _episode(rollout.episode, rollout.turns)}),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "prompt_tokens": len(rollout.prompt_ids),
        # Count the model's tokens only: text written by an environment was not generated.
        "completion_tokens": len(rollout.completion_ids)
        if rollout.model_mask is None
        else sum(map(bool, rollout.model_mask)),
    }


def _episode(episode: Episode, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the conversation of a rollout as JSON has it; long texts and long conversations are cut."""
    share = max(TEXT_LENGTH // max(len(episode.messages), 1), _LEAST_TEXT)
    return {
        "environment": episode.environment,
        "messages": _cut(episode.messages[:MOST_SPANS], share),
        "turns": [vars(turn) for turn in turns[:MOST_SPANS]],
        "times": episode.times[:MOST_SPANS],
        "tool_calls": [
            {**each.plain(), "content": _cut(each.content, share)} for each in episode.results[:MOST_SPANS]
        ],
        "info": _cut(episode.info, share),
        "rewards": episode.rewards,
        "error": episode.lost or episode.failure,
    }


def _cut(value: Any, most: int = TEXT_LENGTH) -> Any:
    """Cut long texts in the middle, also those in nested plain values."""
    if isinstance(value, Mapping):
        return {name: _cut(each, most) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(each, most) for each in value]
    if not isinstance(value, str) or len(value) <= most:
        return value
    half = most // 2
    return f"{value[:half]}\n[... {len(value) - 2 * half} characters ...]\n{value[-half:]}"


def _number(value: float | None) -> float | None:
    """Return a number, or None for NaN, which JSON lacks; here it means that nobody scored."""
    return value if value is not None and math.isfinite(value) else None


def _info(trace: Trace, experiment_id: str, run_id: str, key: str) -> TraceInfo:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    begin, _, end = _times(trace)
    return TraceInfo(
        trace_id=trace_id(key, trace),
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=begin // 1_000_000,
        execution_duration=(end - begin) // 1_000_000,
        state=TraceState.OK,
        request_preview=trace["prompt"][:_PREVIEW],
        response_preview=trace["completion"][:_PREVIEW],
        trace_metadata={
            TraceMetadataKey.SOURCE_RUN: run_id,
            TraceMetadataKey.TOKEN_USAGE: json.dumps(_usage(trace)),
            "grpox.policy_version": str(trace["policy_version"]),
        },
        tags={
            TraceTagKey.TRACE_NAME: "rollout",
            **{f"grpox.{name}": str(trace[name]) for name in ("step", "group", "finish_reason")},
        },
        assessments=list(_feedback(trace, run_id, key)),
    )


def _feedback(trace: Trace, run_id: str, key: str) -> Iterator[Assessment]:
    """Return the score of each reward function that gave one, and their weighted sum."""
    from mlflow.entities import AssessmentSource, Feedback

    scores = {"reward": trace["reward"], **{f"rewards/{name}": v for name, v in trace["rewards"].items()}}
    milliseconds = int(trace["time"] * 1000)
    for name, score in ((name, score) for name, score in scores.items() if score is not None):
        feedback = Feedback(
            name=name[:NAME_LENGTH],
            value=score,
            source=AssessmentSource(source_type="CODE", source_id=name[:NAME_LENGTH]),
            trace_id=trace_id(key, trace),
            metadata={"mlflow.assessment.sourceRunId": run_id},
            create_time_ms=milliseconds,
            last_update_time_ms=milliseconds,
        )
        # A fixed id, so that a second write adds no duplicate.
        feedback.assessment_id = f"a-{_digest(trace_id(key, trace), name)}"
        yield feedback


def _spans(trace: Trace, key: str) -> Iterator[Span]:
    """Return the spans of the whole, of the generation or of each turn and each call of a tool, and of each
    reward function; all rewards run at the same time.

    The time of a rollout of one turn is not known: the times are those of its generation batch.
    """
    from mlflow.entities import Span
    from mlflow.tracing.constant import SpanAttributeKey

    begin, generated, end = _times(trace)
    prompt, completion, episode = trace["prompt"], trace["completion"], trace.get("episode")
    root = _digest(key, "root")[:16]

    def span(
        name: str,
        kind: str,
        times: tuple[int, int],
        inputs: Any,
        outputs: Any,
        more: Mapping[str, Any] | None = None,
        failure: str = "",
    ) -> Span:
        attributes = {
            SpanAttributeKey.REQUEST_ID: trace_id(key, trace),
            SpanAttributeKey.SPAN_TYPE: kind,
            SpanAttributeKey.INPUTS: inputs,
            SpanAttributeKey.OUTPUTS: outputs,
            **(more or {}),
        }
        fields: dict[str, Any] = {
            "trace_id": trace_id(key, trace),
            "span_id": root if kind == "CHAIN" else _digest(key, name)[:16],
            "parent_span_id": None if kind == "CHAIN" else root,
            "name": name,
            "start_time_unix_nano": times[0],
            "end_time_unix_nano": times[1],
            "status": {"code": "STATUS_CODE_ERROR" if failure else "STATUS_CODE_OK", "message": failure},
            "attributes": {each: json.dumps(value, ensure_ascii=False) for each, value in attributes.items()},
            "events": [],
        }
        return Span.from_dict(fields)

    def at(seconds: float) -> int:
        """Return the time of an event of the episode, within that of the batch."""
        return min(max(begin + int(seconds * 1e9), begin), generated)

    outcome = {"completion": completion if episode is None else episode["messages"]}
    outcome |= {name: trace[name] for name in ("step", "reward", "advantage")} | trace["extra"]
    outcome |= {} if episode is None else {name: episode[name] for name in ("environment", "info", "error")}
    yield span("rollout", "CHAIN", (begin, end), prompt, outcome)
    for name, score in trace["rewards"].items():
        yield span(f"rewards/{name}", "EVALUATOR", (generated, end), completion, score)
    if episode is None:
        usage = {"mlflow.chat.tokenUsage": _usage(trace), "finish_reason": trace["finish_reason"]}
        yield span("generate", "LLM", (begin, generated), prompt, completion, usage)
        return
    heard: list[Any] = [prompt]
    number = 0
    for message in episode["messages"]:
        if message.get("role") != "assistant" or number >= len(episode["turns"]):
            heard.append(message)
            continue
        turn = episode["turns"][number]
        start, stop = episode["times"][number] if episode["times"] else (0.0, 0.0)
        more = {name: turn[name] for name in ("finish_reason", "policy_version", "reward")}
        yield span(f"turn {number}", "LLM", (at(start), at(stop)), heard, message, more)
        for place, call in enumerate(episode["tool_calls"]):
            if call["turn"] == number:
                inputs = {each: call[each] for each in ("name", "arguments")}
                name, times = f"tool {call['name']} {place}", (at(stop), at(stop + call["seconds"]))
                yield span(name, "TOOL", times, inputs, call["content"], failure=call["failure"])
        heard, number = [], number + 1


def _times(trace: Trace) -> tuple[int, int, int]:
    """Return the Unix nanoseconds at which sampling began, scoring began, and scoring ended."""
    end = trace["time"]
    scored = end - trace["seconds"].get("reward", 0.0)
    begin = scored - sum(trace["seconds"].get(name, 0.0) for name in ("generate", "environment"))
    return int(begin * 1e9), int(scored * 1e9), int(end * 1e9)


def _usage(trace: Trace) -> dict[str, int]:
    prompt, sampled = trace["prompt_tokens"], trace["completion_tokens"]
    return {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}


def _digest(*parts: object) -> str:
    """Return 32 hexadecimal digits."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:32]
