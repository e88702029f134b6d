"""Measures of a step's tokens: means and extremes over micro-batches and ranks, the mismatch, recorded tokens.

The values of each pass are stacked once, on the device, and every measure is selected from this stack. The
passes computed the values anyway, so recording costs no forward pass. The host waits once to read all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.contracts import Correction
from grpox.policy.batch import PackedBatch, Sample, TokenRecord, upload
from grpox.runtime.world import World
from grpox.update.mismatch import mismatch_inputs, mismatch_metrics, mismatch_of
from grpox.update.objective import MicroBatchLoss

Passes = Sequence[tuple[PackedBatch, MicroBatchLoss]]
"""The micro-batches of a step as they went through the model, each with its share of the loss."""
_Part = tuple[int, Tensor, Tensor, Tensor]
"""A micro-batch of N tokens with K values each: N, their sums f64[K], least f64[K] and largest f64[K]."""


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


class TokenMetrics:
    """Means and extremes of per-token values over one optimizer step, all ranks.

    Values that are measured together are added together, as one tensor. Every rank must add the same names,
    since their reduction is one collective.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, ...], list[_Part]] = defaultdict(list)
        """Names that are added together -> a part of each micro-batch."""

    def add(self, names: Iterable[str], values: Tensor, of_means: bool = False) -> None:
        """Add the values f64[K, N] of K names.

        Args:
            of_means: take extremes over the means of micro-batches, as TRL's low_min, high_max; default: over
                single tokens.
        """
        spread = values.mean(dim=1, keepdim=True) if of_means else values
        sums, count = values.sum(dim=1), values.shape[1]
        # aminmax wakes every thread, even for a few values, and waits for busy ones.
        ends = (spread.amin(dim=1), spread.amax(dim=1)) if count else (sums + torch.inf, sums - torch.inf)
        self._parts[tuple(names)].append((count, sums, *ends))

    def reduce(self, world: World) -> Tensor:
        """Reduce over all ranks, on the device: f64[2, n, 2] for `named`; a collective."""
        if not self._parts:
            return torch.empty(2, 0, 2, dtype=torch.float64, device=world.device)
        sums, ends = [], []
        for name in sorted(self._parts):
            counts, of_sums, of_least, of_most = zip(*self._parts[name], strict=True)
            total = torch.stack(of_sums).sum(dim=0)
            least, most = torch.stack(of_least).amin(dim=0), torch.stack(of_most).amax(dim=0)
            sums.append(torch.stack((total, torch.full_like(total, sum(counts))), dim=1))  # f64[K, 2]
            ends.append(torch.stack((-least, most), dim=1))
        added = world.reduce(torch.cat(sums), dist.ReduceOp.SUM)
        return torch.stack((added, world.reduce(torch.cat(ends), dist.ReduceOp.MAX)))

    def named(self, numbers: Tensor) -> dict[str, tuple[float, float, float]]:
        """name -> (mean, min, max) over all ranks; names for which no token counted are left out.

        Args:
            numbers: result of `reduce`, on the host.
        """
        totals: dict[str, tuple[float, float, float, float]] = {}
        for name, (total, count), (low, high) in zip(
            chain.from_iterable(sorted(self._parts)), *numbers.tolist(), strict=True
        ):
            # Several groups may have a name, if a loss does not always return the same diagnostics.
            before = totals.get(name, (0.0, 0.0, low, high))
            totals[name] = before[0] + total, before[1] + count, max(before[2], low), max(before[3], high)
        return {
            name: (total / count, -low, high) for name, (total, count, low, high) in totals.items() if count
        }


@dataclass(eq=False)
class StepMeasures:
    """Measures of a step's tokens on this rank, on the device."""

    metrics: TokenMetrics
    requested: Tensor | None  # f64[names, N]: values of the step's N tokens that statistics ask for
    recorded: Sequence[Sample]
    facts: Tensor | None  # f64[5, tokens of the samples to record]; None: there are none

    def facts_of(self, values: Tensor) -> list[TokenFacts]:
        """Return the facts about each sample to record, and mark it as recorded.

        Args:
            values: `facts`, on the host; anything if there is no sample to record.
        """
        facts, end = [], 0
        for sample in self.recorded:
            begin, end = end, end + int(sample.token_mask.sum())
            computed = np.zeros((len(values), len(sample.completion)), np.float32)
            computed[:, sample.token_mask] = values[:, begin:end].numpy()
            *scores, counted = computed  # logprob, ratio, entropy and correction
            record, sample.token_record = sample.token_record, None
            assert record is not None
            ids, mask = np.asarray(sample.completion, np.int32), sample.token_mask
            advantage = np.broadcast_to(np.asarray(sample.advantage, np.float32), len(ids))
            own = (ids, mask, counted > 0, sample.sampler_logprobs, advantage)
            facts.append(TokenFacts(record, *own, *scores))
        return facts


@torch.no_grad()
def measure(passes: Passes, correction: Correction, requested: Sequence[str] = ()) -> StepMeasures:
    """Measure the tokens of a step on this rank, without reading a value.

    Args:
        correction: the correction of the step; see `grpox.update.mismatch.mismatch_of`.
        requested: diagnostics, or "entropy" or "advantages", whose values statistics ask for.
    """
    metrics, parts = TokenMetrics(), []
    recorded, places = _recorded(passes)
    for batch, result in passes:
        inputs, mask = result.inputs, result.inputs.token_mask
        assert inputs.entropy is not None
        assert result.correction is not None
        weights, keep = result.correction
        known = {"entropy": inputs.entropy, **result.diagnostics}
        of_mismatch = mismatch_inputs(result, batch.sampler_logprobs, correction)
        values = [*known.values(), *of_mismatch]
        names = list(known)
        if requested:
            known["advantages"] = inputs.advantages
            known |= {name: each.unsqueeze(1).expand_as(mask) for name, each in result.of_sequences.items()}
            values += [known[name] for name in requested]
        if recorded:
            counted = keep if result.policy_keep is None else keep & result.policy_keep
            values += [inputs.logprobs, known["ratio"], inputs.entropy, weights, counted]
        tokens = torch.stack(values).flatten(1).index_select(1, batch.token_places).double()
        metrics.add(names, tokens[: len(names)], of_means=True)
        parts.append(tokens[len(names) :])
        left_out = {}
        if (near := result.off_policy_keep) is not None:
            left_out["off_policy_masked"] = (mask & ~near).any(dim=1)
        # Added separately: ranks must add the same names, and a loss may leave out its own in a filler.
        for of_rows in filter(None, (result.of_sequences, left_out)):
            rows = torch.stack(list(of_rows.values())).index_select(1, batch.trained_rows)
            metrics.add(of_rows, rows.double(), of_means=True)
    tokens = torch.cat(parts, dim=1)
    begin, end = len(of_mismatch), len(of_mismatch) + len(requested)
    mismatch = mismatch_of(tokens[:begin], correction)
    metrics.add(mismatch, torch.stack(list(mismatch.values())))
    facts = tokens[end:].index_select(1, upload([places], tokens.device)[0]) if recorded else None
    return StepMeasures(metrics, tokens[begin:end] if requested else None, recorded, facts)


def _recorded(passes: Passes) -> tuple[list[Sample], np.ndarray]:
    """Find the samples to record, and the places of their tokens among the step's tokens, i64[tokens].

    A step may train on a sample several times, and records the first.
    """
    samples: dict[int, Sample] = {}
    places, end = [np.zeros(0, np.int64)], 0
    for batch, _ in passes:
        for sample, length in zip(batch.samples, batch.host_mask.sum(axis=1).tolist(), strict=True):
            begin, end = end, end + length
            if sample.token_record is not None and id(sample) not in samples:
                samples[id(sample)] = sample
                places.append(np.arange(begin, end))
    return list(samples.values()), np.concatenate(places)


def read_together(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy tensors of a device to the host, as f64, with one wait; None becomes f64[0]."""
    together = torch.cat([each.double().flatten() for each in tensors if each is not None]).cpu()
    parts = torch.split(together, [0 if each is None else each.numel() for each in tensors])
    return [part if each is None else part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def metrics_of(reduced: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Name means and extremes as TRL does: a bare name for means, `_mean`, `_min` and `_max` below a slash.

    Args:
        reduced: name -> mean, min, max.
    """
    metrics = mismatch_metrics(reduced)
    for name, (mean, low, high) in reduced.items():
        if "/" in name:
            metrics |= {f"{name}_mean": mean, f"{name}_min": low, f"{name}_max": high}
        elif name == "ratio":
            metrics |= {"ratio/mean": mean, "ratio/min": low, "ratio/max": high}
        else:
            metrics[name] = mean
    return metrics
