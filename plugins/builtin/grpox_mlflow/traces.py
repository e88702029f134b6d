"""Traced rollouts -> MLflow's traces: spans for generation and each reward, rewards as feedback.

A trace's id follows from its run, step and row. So a request may be repeated, and a resumed run makes no second
one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox_mlflow.naming import NAME_LENGTH
from grpox_mlflow.recorded import RecordedLines
from grpox_mlflow.traced import FILE

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo

PER_PIECE = 20
"""Traces written between two looks at the metrics."""
_PREVIEW = 1000
"""Characters that the list of traces shows of prompt and completion."""


class RecordedTraces(RecordedLines):
    """``traces.jsonl``, a piece at a time."""

    def __init__(self, folder: Path, position: int = 0) -> None:
        super().__init__(folder / FILE, position)

    def next(self) -> tuple[list[dict[str, Any]], int]:
        """The next traces, and where they end."""
        found: list[dict[str, Any]] = []
        end = self.position
        for line, line_end in self.lines():
            end = line_end
            with suppress(ValueError):  # of a process that was killed meanwhile
                found.append(json.loads(line))
            if len(found) == PER_PIECE:
                break
        return found, end


def write_traces(
    uri: str, experiment_id: str, run_id: str, key: str, traced: Sequence[Mapping[str, Any]]
) -> None:
    """Write traces to the store, or once more what it has of them.

    Args:
        key: of the run, wherever it is kept.
    """
    from mlflow.tracing.client import TracingClient

    client = TracingClient(uri)
    spans: list[Span] = []
    for each in traced:
        client.start_trace(_info(each, experiment_id, run_id, key))
        spans += _spans(each, key)
    if spans:
        client.log_spans(experiment_id, spans)


def trace_id(key: str, traced: Mapping[str, Any]) -> str:
    """``tr-`` and 32 hexadecimal digits."""
    return f"tr-{_digest(key, traced['step'], traced['batch'], traced['row'])}"


def _info(traced: Mapping[str, Any], experiment_id: str, run_id: str, key: str) -> TraceInfo:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    begin, _, end = _times(traced)
    usage = _usage(traced)
    return TraceInfo(
        trace_id=trace_id(key, traced),
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=begin // 1_000_000,
        execution_duration=(end - begin) // 1_000_000,
        state=TraceState.OK,
        request_preview=traced["prompt"][:_PREVIEW],
        response_preview=traced["completion"][:_PREVIEW],
        trace_metadata={
            TraceMetadataKey.SOURCE_RUN: run_id,
            TraceMetadataKey.TOKEN_USAGE: json.dumps(usage),
            "grpox.policy_version": str(traced["policy_version"]),
        },
        tags={
            TraceTagKey.TRACE_NAME: "rollout",
            "grpox.step": str(traced["step"]),
            "grpox.group": str(traced["group"]),
            "grpox.finish_reason": str(traced["finish_reason"]),
        },
        assessments=list(_feedback(traced, run_id, key)),
    )


def _feedback(traced: Mapping[str, Any], run_id: str, key: str) -> Iterator[Assessment]:
    """The score of each reward function that gave one, and their weighted sum."""
    from mlflow.entities import AssessmentSource, Feedback

    scores = {"reward": traced["reward"], **{f"rewards/{name}": v for name, v in traced["rewards"].items()}}
    milliseconds = int(traced["time"] * 1000)
    for name, score in scores.items():
        if score is None:
            continue
        source = AssessmentSource(source_type="CODE", source_id=name[:NAME_LENGTH])
        given = Feedback(
            name=name[:NAME_LENGTH],
            value=score,
            source=source,
            trace_id=trace_id(key, traced),
            metadata={"mlflow.assessment.sourceRunId": run_id},
            create_time_ms=milliseconds,
            last_update_time_ms=milliseconds,
        )
        # Of its own, so that a second writing adds none.
        given.assessment_id = f"a-{_digest(trace_id(key, traced), name)}"
        yield given


def _spans(traced: Mapping[str, Any], key: str) -> Iterator[Span]:
    """The whole, the generation, and each reward function, which all score at the same time.

    How long one rollout took is not known: the times are those of its generation batch.
    """
    begin, generated, end = _times(traced)
    prompt, completion = traced["prompt"], traced["completion"]
    root = _digest(key, "root")[:16]
    whole = {
        "step": traced["step"],
        "reward": traced["reward"],
        "advantage": traced["advantage"],
        **traced["extra"],
    }
    yield _span(
        traced, key, "rollout", "CHAIN", (begin, end), prompt, {"completion": completion, **whole}, root, ""
    )
    usage = {"mlflow.chat.tokenUsage": _usage(traced), "finish_reason": traced["finish_reason"]}
    yield _span(traced, key, "generate", "LLM", (begin, generated), prompt, completion, "", root, usage)
    for name, score in traced["rewards"].items():
        times = (generated, end)
        yield _span(traced, key, f"rewards/{name}", "EVALUATOR", times, completion, score, "", root)


def _span(
    traced: Mapping[str, Any],
    key: str,
    name: str,
    kind: str,
    times: tuple[int, int],
    inputs: object,
    outputs: object,
    own: str,
    parent: str,
    attributes: Mapping[str, object] | None = None,
) -> Span:
    from mlflow.entities import Span
    from mlflow.tracing.constant import SpanAttributeKey

    told = {
        SpanAttributeKey.REQUEST_ID: trace_id(key, traced),
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
        **(attributes or {}),
    }
    return Span.from_dict(
        {
            "trace_id": trace_id(key, traced),
            "span_id": own or _digest(key, name)[:16],
            "parent_span_id": parent or None,
            "name": name,
            "start_time_unix_nano": times[0],
            "end_time_unix_nano": times[1],
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {name: json.dumps(value, ensure_ascii=False) for name, value in told.items()},
            "events": [],
        }
    )


def _times(traced: Mapping[str, Any]) -> tuple[int, int, int]:
    """Unix nanoseconds at which sampling began, scoring began, and scoring ended."""
    end = traced["time"]
    scored = end - traced["seconds"].get("reward", 0.0)
    begin = scored - traced["seconds"].get("generate", 0.0)
    return int(begin * 1e9), int(scored * 1e9), int(end * 1e9)


def _usage(traced: Mapping[str, Any]) -> dict[str, int]:
    given, sampled = traced["prompt_tokens"], traced["completion_tokens"]
    return {"input_tokens": given, "output_tokens": sampled, "total_tokens": given + sampled}


def _digest(*parts: object) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:32]
