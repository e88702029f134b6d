"""Advantages of a generation batch: the scaler's own copies of what it reads, and its result checked.

A scaler of the form ``scale(inputs)`` may return a number for each turn or token. They become advantages of
tokens; tokens that the model did not write have 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs, AdvantageScaler, Rollout, Turn
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.rewards.scoring import ScoredRow
from grpox.runtime.foreign_code import call, copied


@dataclass(frozen=True)
class Advantages:
    """Advantages of N completions."""

    values: Tensor  # f32[N]; the mean over the model's tokens where they have different ones
    tokens: Sequence[Tensor] | None = None
    """N of f32[T_i]; None where each completion has one advantage."""

    def of_rows(self, rows: Sequence[int]) -> list[float | np.ndarray]:
        """List the advantages of some completions: one number each, or f32[T_i] each."""
        if self.tokens is None:
            return list(self.values[rows].tolist())
        return [self.tokens[row].numpy() for row in rows]


@dataclass(frozen=True)
class ScoredBatch:
    """A scored generation batch, as a scaler needs it."""

    rows: Sequence[ScoredRow]
    rewards: Tensor  # f32[N, K]
    weights: Tensor  # f32[K]
    group_ids: Tensor  # i64[N]
    indices: Sequence[int]
    """The dataset's row of each group's prompt."""
    columns: Callable[[], Mapping[str, Sequence[Any]]]
    """Reads the dataset's columns, N values each."""
    step: int
    """The optimizer step that first trains on it."""
    labels: Sequence[str]
    """Of the reward functions, K."""


class BatchScaler:
    """Calls the run's scaler in the form that it has."""

    def __init__(self, scaler: AdvantageScaler) -> None:
        self._scale: Callable[..., Any] = scaler.scale
        self._name = type(scaler).__name__
        self.takes_inputs = bool(takes_inputs(scaler))
        self._per: str = getattr(scaler, "per", "completion") if self.takes_inputs else "completion"

    def scale(self, batch: ScoredBatch) -> Advantages:
        """Scale the rewards of a batch.

        Raises:
            RunFailed: the scaler raised, or returned anything else than finite numbers of the right shape.
        """
        # The metrics are made of the rewards, whatever the scaler does with its own.
        if not self.takes_inputs:
            own = batch.rewards.clone(), batch.weights.clone(), batch.group_ids.clone()
            return Advantages(self._checked(call("advantage", self._scale, *own), len(batch.rows)))
        scaled = call("advantage", self._scale, _inputs(batch))
        if self._per == "completion":
            return Advantages(self._checked(scaled, len(batch.rows)))
        return self._of_tokens(scaled, [row.rollout for row in batch.rows])

    def _checked(self, scaled: Any, count: int) -> Tensor:
        if not isinstance(scaled, Tensor) or scaled.shape != (count,):
            shape = _described(scaled)
            raise RunFailed(
                f"advantage '{self._name}' returned {shape}; one number per completion is ({count},)"
            )
        if not bool(scaled.isfinite().all()):
            bad = scaled[~scaled.isfinite()][0]
            raise RunFailed(f"advantage '{self._name}' returned {bad} for a completion")
        return scaled

    def _of_tokens(self, scaled: Any, rollouts: Sequence[Rollout]) -> Advantages:
        """Check one tensor a completion and spread it over the tokens."""
        if not isinstance(scaled, list | tuple) or len(scaled) != len(rollouts):
            what = f"{len(scaled)} values" if isinstance(scaled, list | tuple) else _described(scaled)
            raise RunFailed(
                f"advantage '{self._name}' returned {what}; per '{self._per}' is a list of {len(rollouts)} "
                "tensors, one for each completion"
            )
        tokens = [self._spread(each, rollout) for each, rollout in zip(scaled, rollouts, strict=True)]
        means = []
        for each, rollout in zip(tokens, rollouts, strict=True):
            written = each[model_mask(rollout)].double()
            means.append(float(written.mean()) if len(written) else 0.0)
        return Advantages(torch.tensor(means), tokens)

    def _spread(self, scaled: Any, rollout: Rollout) -> Tensor:
        """Return f32[T], 0 where the model did not write."""
        turns, length = turns_of(rollout), len(rollout.completion_ids)
        count = len(turns) if self._per == "turn" else length
        whose = f"advantage '{self._name}' returned %s for sample {rollout.sample} of group {rollout.group_id}"
        if not isinstance(scaled, Tensor) or scaled.shape != (count,):
            raise RunFailed(f"{whose % _described(scaled)}; one number per {self._per} is ({count},)")
        if not bool(scaled.isfinite().all()):
            raise RunFailed(whose % str(scaled[~scaled.isfinite()][0].item()))
        values = scaled.detach().to("cpu", torch.float32)
        if self._per == "turn":
            of_turns, values = values, torch.zeros(length)
            for turn, advantage in zip(turns, of_turns, strict=True):
                values[turn.start : turn.end] = advantage
        return torch.where(model_mask(rollout), values, 0.0)


def _described(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _inputs(batch: ScoredBatch) -> AdvantageInputs:
    rollouts = [row.rollout for row in batch.rows]
    labels = dict.fromkeys(label for row in batch.rows for label in row.token_rewards)
    return AdvantageInputs(
        rewards=batch.rewards.clone(),
        weights=batch.weights.clone(),
        group_ids=batch.group_ids.clone(),
        prompt_ids=torch.tensor([batch.indices[rollout.group_id] for rollout in rollouts]),
        lengths=torch.tensor([len(rollout.completion_ids) for rollout in rollouts]),
        model_masks=[model_mask(rollout) for rollout in rollouts],
        columns={name: copied(list(values)) for name, values in batch.columns().items()},
        step=batch.step,
        turns=[turns_of(rollout) for rollout in rollouts],
        labels=tuple(batch.labels),
        token_rewards={
            label: [torch.tensor(row.token_rewards[label], dtype=torch.float32) for row in batch.rows]
            for label in labels
        },
    )


def model_mask(rollout: Rollout) -> Tensor:
    """Return bool[T]: the tokens that the model wrote."""
    mask = rollout.model_mask
    if mask is None:
        return torch.ones(len(rollout.completion_ids), dtype=torch.bool)
    return torch.tensor(mask, dtype=torch.bool)


def turns_of(rollout: Rollout) -> tuple[Turn, ...]:
    """Return the turns of a rollout; the whole completion is one where it names none."""
    if rollout.turns:
        return tuple(rollout.turns)
    return (Turn(0, len(rollout.completion_ids), rollout.finish_reason, rollout.policy_version),)
