"""Facts about the single tokens of some completions, taken from the pass that trains on them.

The pass has computed them all: recording costs no forward, and the host reads them with the step's metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from grpox.policy.batch import PackedBatch, Sample, TokenRecord, upload
from grpox.update.objective import MicroBatchLoss


@dataclass(frozen=True, eq=False)
class TokenFacts:
    """Facts about the T tokens of one completion, from the first pass that trains on it."""

    record: TokenRecord
    ids: np.ndarray  # i32[T]
    is_scored: np.ndarray  # bool[T]: the pass computed the last four fields; elsewhere they mean nothing
    is_counted: np.ndarray  # bool[T]: the policy loss is taken over it
    sampler_logprob: np.ndarray  # f32[T], NaN where the generator reported none
    advantage: np.ndarray  # f32[T]
    logprob: np.ndarray  # f32[T], log pi before the step
    ratio: np.ndarray  # f32[T], pi / pi_old, without the correction
    entropy: np.ndarray  # f32[T], nats
    correction: np.ndarray  # f32[T], the correction's weight R


Scored = Sequence[tuple[PackedBatch, MicroBatchLoss]]


def recorded_samples(scored: Scored) -> Iterable[tuple[Sample, MicroBatchLoss, int]]:
    """Yield each sample to record, with its micro-batch and its row in it.

    A step may train on a sample several times, and records the first.
    """
    seen = set()
    for batch, result in scored:
        for row, sample in enumerate(batch.samples):
            if sample.token_record is not None and id(sample) not in seen:
                seen.add(id(sample))
                yield sample, result, row


@torch.no_grad()
def select_facts(scored: Scored) -> Tensor | None:
    """Select what the passes have computed for the samples to record: f32[5, their tokens], on the device.

    Returns:
        None if there is no sample to record.
    """
    selected = []
    for _, group in groupby(recorded_samples(scored), key=lambda each: id(each[1])):
        chosen = list(group)
        computed = _computed(chosen[0][1])
        lengths = [len(sample.completion) for sample, _, _ in chosen]
        rows = np.repeat([row for _, _, row in chosen], lengths)
        columns = np.concatenate([np.arange(length) for length in lengths])
        places = tuple(upload([rows, columns], computed[0].device))
        selected.append(torch.stack([values[places].float() for values in computed]))
    return torch.cat(selected, dim=1) if selected else None


def _computed(result: MicroBatchLoss) -> list[Tensor]:
    """[B, T] each: log-probability, ratio, entropy, correction, and 1 where the policy loss counts a token."""
    inputs, corrected = result.inputs, result.corrected
    assert inputs.entropy is not None
    assert corrected is not None
    counted = inputs.token_mask & corrected.keep
    for keep in (inputs.policy_keep, result.off_policy_keep):
        counted = counted if keep is None else counted & keep
    return [inputs.logprobs, result.diagnostics["ratio"], inputs.entropy, corrected.weights, counted]


def facts_of(scored: Scored, values: Tensor) -> list[TokenFacts]:
    """Return the facts about each sample to record, and mark it as recorded.

    Args:
        values: result of `select_facts` on the host; anything if there is no sample to record.
    """
    samples = [sample for sample, _, _ in recorded_samples(scored)]
    if not samples:
        return []
    ends = np.cumsum([len(sample.completion) for sample in samples])
    parts = np.split(values.numpy().astype(np.float32), ends[:-1], axis=1)
    facts = []
    for sample, (logprob, ratio, entropy, correction, counted) in zip(samples, parts, strict=True):
        record, sample.token_record = sample.token_record, None
        assert record is not None
        advantage = np.broadcast_to(np.asarray(sample.advantage, np.float32), len(sample.completion))
        facts.append(
            TokenFacts(
                record,
                ids=np.asarray(sample.completion, np.int32),
                is_scored=sample.token_mask,
                is_counted=counted > 0,
                sampler_logprob=sample.sampler_logprobs,
                advantage=advantage,
                logprob=logprob,
                ratio=ratio,
                entropy=entropy,
                correction=correction,
            )
        )
    return facts
