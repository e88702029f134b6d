"""Statistics of an optimizer step that components ask for, over all ranks (`grpox.contracts.StepAware`).

Each value belongs to a row of the step, a completion. The parts of all ranks are put in the order of the rows
before they are reduced, so that a result does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import StatisticReduction
from grpox.data.schedule import StepPlan
from grpox.errors import RunFailed, nearest
from grpox.policy.batch import PackedBatch, Sample
from grpox.runtime.world import World
from grpox.update.objective import MicroBatchLoss
from grpox.update.token_metrics import select_values

OF_TOKENS = ("ratio", "kl_old", "kl", "entropy", "advantages")
"""Values of each trained token, beside the diagnostics of the loss."""
OF_COMPLETIONS = ("reward", "advantage", "length")

Wanted = Mapping[tuple[str, StatisticReduction], str]
"""(name, reduction) -> the component that asks for it."""
Statistics = Mapping[tuple[str, StatisticReduction], float | Tensor]
"""(name, reduction) -> a number, or for ``gather`` f32[values of all ranks] on the CPU."""
Scored = Sequence[tuple[PackedBatch, MicroBatchLoss]]
RowValues = dict[str, np.ndarray]
"""Name -> f32[values of the row]: one of a completion, those of its trained tokens."""


@dataclass
class StepStatistics:
    """Collects the values of a step on this rank, and reduces them over all."""

    wanted: Wanted
    _tokens: dict[int, RowValues] = field(default_factory=dict)
    """Identity of a sample -> values of its trained tokens."""

    @property
    def _of_tokens(self) -> dict[str, str]:
        return {name: who for (name, _), who in self.wanted.items() if name not in OF_COMPLETIONS}

    def select(self, scored: Scored) -> Tensor | None:
        """Select the values of this rank's trained tokens: f32[names, tokens], on the device.

        Returns:
            None if no component asks for values of tokens.

        Raises:
            RunFailed: the step has no values of a name that a component asks for.
        """
        names, parts = list(self._of_tokens), []
        if not names:
            return None
        for batch, result in scored:
            values = _values_of_tokens(batch, result)
            self._check_names(values, result)
            selected = [select_values({name: values[name]}, batch.token_places) for name in names]
            parts.append(torch.cat([each.float() for each in selected]))
        return torch.cat(parts, dim=1)

    def record(self, scored: Scored, values: Tensor) -> None:
        """Keep the values of this rank's trained tokens until `reduce`.

        Args:
            values: result of `select` on the host.
        """
        self._tokens.clear()
        names = list(self._of_tokens)
        samples = [sample for batch, _ in scored for sample in batch.samples]
        lengths = np.concatenate([batch.host_mask.sum(axis=1) for batch, _ in scored])
        # f32[names, tokens of the row] each
        rows = np.split(values.float().numpy(), lengths.cumsum()[:-1], axis=1)
        for sample, row in zip(samples, rows, strict=True):
            self._tokens[id(sample)] = dict(zip(names, row, strict=True))

    def _check_names(self, values: Mapping[str, Tensor], result: MicroBatchLoss) -> None:
        for name, who in self._of_tokens.items():
            if name not in values:
                known = [*values, *OF_COMPLETIONS]
                near = nearest(name, known)
                hint = f"; did you mean '{near}'?" if near else ""
                raise RunFailed(
                    f"{who} asks for the statistic '{name}', which no step of this run has{hint} (it has "
                    f"{', '.join(known)})"
                )
        for name in (*OF_COMPLETIONS, "advantages"):
            if name in result.diagnostics and any(name == each for each, _ in self.wanted):
                who = next(who for (each, _), who in self.wanted.items() if each == name)
                raise RunFailed(
                    f"{who} asks for the statistic '{name}', which is a diagnostic of the loss too: rename it"
                )

    def reduce(self, plan: StepPlan, micro_batches: Sequence[Sequence[Sample]], world: World) -> Statistics:
        """Reduce the values of a step over all ranks; a collective where a component wants any.

        Args:
            micro_batches: this rank's samples of the step, as `record` saw them.
        """
        if not self.wanted:
            return {}
        keys = [
            (each.generation, each.iteration, row)
            for each in plan.micro_batches
            for row in each.rank_rows(world.rank)
        ]
        samples = [sample for each in micro_batches for sample in each]
        parts = []
        for key, sample in zip(keys, samples, strict=True):
            own = {"reward": sample.reward, "advantage": sample.mean_advantage, "length": sample.model_length}
            of_row = {name: np.array([value], dtype=np.float32) for name, value in own.items()}
            values = self._tokens.get(id(sample), {}) | of_row
            parts.append((key, [_part(name, how, values[name]) for name, how in self.wanted]))
        self._tokens.clear()
        rows = [part for _, part in sorted(world.gather(parts), key=itemgetter(0))]
        return {each: _whole(each[1], [row[place] for row in rows]) for place, each in enumerate(self.wanted)}


def _values_of_tokens(batch: PackedBatch, result: MicroBatchLoss) -> dict[str, Tensor]:
    """Name -> [B, T] of the values of tokens."""
    inputs = result.inputs
    advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages.unsqueeze(1)
    values = {**result.diagnostics, "advantages": advantages.expand_as(batch.token_mask)}
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy.detach()
    return values


def _part(name: str, reduction: StatisticReduction, values: np.ndarray) -> np.ndarray:
    """Reduce one row: f32[values], or f64[2] of sum and count, or f64[0 or 1] of an extreme."""
    if reduction == "gather":
        return values
    exact = values.astype(np.float64)
    if name == "reward":  # a completion that no function scored has none
        exact = exact[~np.isnan(exact)]
    if reduction in ("sum", "mean"):
        return np.array([exact.sum(), len(exact)])
    extreme = np.min if reduction == "min" else np.max
    return np.array([extreme(exact)]) if len(exact) else exact


def _whole(reduction: StatisticReduction, parts: Sequence[np.ndarray]) -> float | Tensor:
    """Reduce the parts of all rows; NaN for a mean or an extreme of nothing."""
    together = np.concatenate([np.zeros(0, parts[0].dtype), *parts]) if parts else np.zeros(0, np.float32)
    if reduction == "gather":
        return torch.from_numpy(together)
    if reduction in ("sum", "mean"):
        total, count = float(together[0::2].sum()), float(together[1::2].sum())
        return total if reduction == "sum" else total / count if count else math.nan
    if not len(together):
        return math.nan
    return float(together.min() if reduction == "min" else together.max())
