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
from grpox.policy.batch import Sample
from grpox.runtime.world import World
from grpox.update.token_metrics import Passes

OF_TOKENS = ("ratio", "kl_old", "kl", "entropy", "advantages")
"""Values of each trained token, beside the diagnostics of the loss."""
OF_COMPLETIONS = ("reward", "advantage", "length")

Wanted = Mapping[tuple[str, StatisticReduction], str]
"""(name, reduction) -> the component that asks for it."""
Statistics = Mapping[tuple[str, StatisticReduction], float | Tensor]
"""(name, reduction) -> a number, or for ``gather`` f32[values of all ranks] on the CPU."""
RowValues = dict[str, np.ndarray]
"""Name -> f32[values of the row]: one for a completion, or one for each of its trained tokens."""


@dataclass
class StepStatistics:
    """Collects the values of a step on this rank, and reduces them over all ranks."""

    wanted: Wanted
    _tokens: dict[int, RowValues] = field(default_factory=dict)
    """Identity of a sample -> values of its trained tokens."""

    def names(self, passes: Passes) -> list[str]:
        """List the values of tokens that components ask for.

        Raises:
            RunFailed: a component asks for a name that the step does not have.
        """
        of_tokens = {name: who for (name, _), who in self.wanted.items() if name not in OF_COMPLETIONS}
        for _, result in passes if of_tokens else ():
            own = (*result.diagnostics, *result.of_sequences)
            known = (*own, "advantages", "entropy")
            for name, who in of_tokens.items():
                if name not in known:
                    near = nearest(name, (*known, *OF_COMPLETIONS))
                    hint = f"; did you mean '{near}'?" if near else ""
                    raise RunFailed(
                        f"{who} asks for the statistic '{name}', which no step of this run has{hint} (it has "
                        f"{', '.join((*known, *OF_COMPLETIONS))})"
                    )
            for (name, _), who in self.wanted.items():
                if name in own and name in (*OF_COMPLETIONS, "advantages"):
                    what = f"the statistic '{name}', which is a diagnostic of the loss too: rename it"
                    raise RunFailed(f"{who} asks for {what}")
        return list(of_tokens)

    def record(self, names: Sequence[str], passes: Passes, values: Tensor) -> None:
        """Keep the values of this rank's trained tokens until `reduce`.

        Args:
            names: result of `names`.
            values: f64[names, tokens] on the host.
        """
        self._tokens.clear()
        samples = [sample for batch, _ in passes for sample in batch.samples]
        lengths = np.concatenate([batch.host_mask.sum(axis=1) for batch, _ in passes])
        # f32[names, tokens of the row] each
        rows = np.split(values.float().numpy(), lengths.cumsum()[:-1], axis=1)
        for sample, row in zip(samples, rows, strict=True):
            self._tokens[id(sample)] = dict(zip(names, row, strict=True))

    def reduce(self, plan: StepPlan, micro_batches: Sequence[Sequence[Sample]], world: World) -> Statistics:
        """Reduce the values of a step over all ranks; a collective.

        Args:
            micro_batches: this rank's samples of the step, as `record` saw them.
        """
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
    """Reduce the parts of all rows; a mean or an extreme without values is NaN."""
    together = np.concatenate([np.zeros(0, parts[0].dtype), *parts]) if parts else np.zeros(0, np.float32)
    if reduction == "gather":
        return torch.from_numpy(together)
    if reduction in ("sum", "mean"):
        total, count = float(together[0::2].sum()), float(together[1::2].sum())
        return total if reduction == "sum" else total / count if count else math.nan
    if not len(together):
        return math.nan
    return float(together.min() if reduction == "min" else together.max())
