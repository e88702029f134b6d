"""Advantages of a generation batch, by the run's scaler: one for each completion, turn or token.

A scaler gets its own copies of its inputs, and its result is checked. A scaler of the form ``scale(inputs)``
may return a number for each turn or token. They become advantages of tokens; tokens that the model did not
write get 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs, AdvantageScaler, Rollout, ScoredRollout, Turn
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.runtime.foreign_code import call, copied

ZERO = 1e-6
"""Largest advantage that counts as 0: a difference of equal numbers in float32 is a rounding error."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of N completions."""

    values: Tensor  # f32[N]; the mean over the model's tokens where they have different ones
    tokens: Sequence[Tensor] | None = None
    """N of f32[T_i]; None where each completion has one advantage."""

    def silent_groups(self, size: int) -> list[bool]:
        """Return for each group of `size` completions True if it has no advantage other than 0."""
        largest = self.values.abs()
        if self.tokens is not None:
            largest = torch.stack([each.abs().amax() for each in self.tokens])
        silent: list[bool] = (largest <= ZERO).reshape(-1, size).all(dim=1).tolist()
        return silent

    def of_rows(self, rows: Sequence[int]) -> list[float] | list[np.ndarray]:
        """List the advantages of some completions: a number each, or f32[T_i] where tokens have their own."""
        if self.tokens is None:
            numbers: list[float] = self.values[rows].tolist()
            return numbers
        return [self.tokens[row].numpy() for row in rows]


def advantage_inputs(
    rows: Sequence[ScoredRollout],
    rewards: Tensor,
    weights: Tensor,
    indices: Sequence[int],
    columns: Mapping[str, Sequence[Any]] | None,
    step: int,
) -> AdvantageInputs:
    """Return copies of everything that a scaler may read.

    Args:
        rewards: f32[N, K].
        weights: f32[K].
        indices: the dataset's row of each group's prompt.
        columns: the dataset's columns, N values each; None for a scaler of the form ``scale(rewards, weights,
            group_ids)``: masks, turns and rewards of tokens, which it does not get, are then left out.
        step: the optimizer step that first trains on the batch.
    """
    groups, lengths, masks = list[int](), list[int](), list[Tensor]()
    turns, token_rewards = list[tuple[Turn, ...]](), dict[str, list[Tensor]]()
    for row in rows:
        groups.append(row.rollout.group_id)
        lengths.append(len(row.rollout.completion_ids))
        if columns is not None:
            masks.append(model_mask(row.rollout))
            turns.append(turns_of(row.rollout))
            for label, numbers in row.token_rewards.items():
                token_rewards.setdefault(label, []).append(torch.tensor(numbers, dtype=torch.float32))
    return AdvantageInputs(
        rewards=rewards.clone(),
        weights=weights.clone(),
        group_ids=torch.tensor(groups, device=rewards.device),
        prompt_ids=torch.tensor([indices[group] for group in groups]),
        lengths=torch.tensor(lengths),
        model_masks=masks,
        columns={name: copied(list(values)) for name, values in (columns or {}).items()},
        step=step,
        turns=turns,
        labels=tuple(rows[0].rewards),
        token_rewards=token_rewards,
    )


class BatchScaler:
    """The run's scaler, in either of its two forms."""

    def __init__(self, scaler: AdvantageScaler) -> None:
        self._method: Callable[..., Any] = scaler.scale
        self._whose = f"advantage '{type(scaler).__name__}' returned"
        self.takes_inputs = bool(takes_inputs(scaler))
        self._per: str = getattr(scaler, "per", "completion") if self.takes_inputs else "completion"

    def scale(self, rows: Sequence[ScoredRollout], inputs: AdvantageInputs) -> Advantages:
        """Scale the rewards of a batch.

        Raises:
            RunFailed: the scaler raised, or returned anything but finite numbers of the right shape.
        """
        if self.takes_inputs:
            scaled = self.scale_inputs(rows, inputs)
        else:
            own = inputs.rewards, inputs.weights, inputs.group_ids
            scaled = Advantages(call("advantage", self._method, *own))
        if scaled.tokens is None:
            self._check(scaled.values, len(rows), "completion", " for a completion")
        return scaled

    def scale_inputs(self, rows: Sequence[ScoredRollout], inputs: AdvantageInputs) -> Advantages:
        """Call a scaler of the form ``scale(inputs)``; a result of one number per completion is not checked.

        Raises:
            RunFailed: the scaler raised, or it declares advantages of turns or tokens and did not return one
                tensor of finite numbers for each completion.
        """
        scaled = call("advantage", self._method, inputs)
        if self._per == "completion":
            return Advantages(scaled)
        return self._of_tokens(scaled, [row.rollout for row in rows])

    def _check(self, scaled: Any, count: int, per: str, where: str) -> None:
        """Check that the scaler returned `count` finite numbers."""
        if not isinstance(scaled, Tensor) or scaled.shape != (count,):
            place = "" if per == "completion" else where
            raise RunFailed(f"{self._whose} {_described(scaled)}{place}; one number per {per} is ({count},)")
        if not bool(scaled.isfinite().all()):
            raise RunFailed(f"{self._whose} {scaled[~scaled.isfinite()][0].item()}{where}")

    def _of_tokens(self, scaled: Any, rollouts: Sequence[Rollout]) -> Advantages:
        """Check one tensor a completion and spread it over the tokens."""
        if not isinstance(scaled, list | tuple) or len(scaled) != len(rollouts):
            what = f"{len(scaled)} values" if isinstance(scaled, list | tuple) else _described(scaled)
            raise RunFailed(
                f"{self._whose} {what}; per '{self._per}' is a list of {len(rollouts)} tensors, one for each "
                "completion"
            )
        means, tokens = [], []
        for own, rollout in zip(scaled, rollouts, strict=True):
            turns, length, mask = turns_of(rollout), len(rollout.completion_ids), model_mask(rollout)
            where = f" for sample {rollout.sample} of group {rollout.group_id}"
            self._check(own, len(turns) if self._per == "turn" else length, self._per, where)
            values = own.detach().to("cpu", torch.float32)
            if self._per == "turn":
                of_turns, values = values, torch.zeros(length)
                for turn, advantage in zip(turns, of_turns, strict=True):
                    values[turn.start : turn.end] = advantage
            tokens.append(torch.where(mask, values, 0.0))
            written = values[mask].double()
            means.append(float(written.mean()) if len(written) else 0.0)
        return Advantages(torch.tensor(means), tokens)


def _described(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def model_mask(rollout: Rollout) -> Tensor:
    """Return bool[T]: the tokens that the model wrote."""
    mask = rollout.model_mask
    if mask is None:
        return torch.ones(len(rollout.completion_ids), dtype=torch.bool)
    return torch.tensor(mask, dtype=torch.bool)


def turns_of(rollout: Rollout) -> tuple[Turn, ...]:
    """Return the turns of a rollout; without any, the whole completion is one turn."""
    whole = Turn(0, len(rollout.completion_ids), rollout.finish_reason, rollout.policy_version)
    return tuple(rollout.turns) or (whole,)
