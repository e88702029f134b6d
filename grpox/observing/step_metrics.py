"""The metrics of one finished step: what the update measured, with sampling, speed, time and memory added."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence

import torch

from grpox.policy.batch import Sample
from grpox.rollout.collector import GenerationBatch
from grpox.rollout.metrics import mean_metrics


def step_metrics(
    update: Mapping[str, float],
    new: Sequence[GenerationBatch],
    sampled: Sequence[Mapping[str, float]],
    micro_batches: Sequence[Sequence[Sample]],
    times: Mapping[str, float],
    step_time: float,
) -> dict[str, float]:
    """All metrics of a step.

    Args:
        update: what the policy update measured, over all ranks.
        new: generation batches sampled for this step; none when it trains on older ones.
        sampled: the metrics of each of these.
        micro_batches: this rank's samples of the step.
        times: seconds of each phase on this rank, ``time/<phase>``.
        step_time: seconds of the whole step on this rank.
    """
    tokens = sum(len(sample) for samples in micro_batches for sample in samples)
    metrics = {
        **update,
        **mean_metrics(sampled),
        **times,
        "step_time": step_time,
        "tokens_per_second/trained": tokens / times["time/update"],
        "memory/peak_gib": _peak_memory_gib(),
    }
    if new:
        rows = [row for batch in new for row in (*batch.rows, *batch.dropped)]
        generated = sum(len(row.rollout.completion_ids) for row in rows)
        metrics["tokens_per_second/generated"] = generated / times["time/generate"]
    return metrics


def _peak_memory_gib() -> float:
    """Peak memory of this process: on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
