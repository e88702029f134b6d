"""Turns and tokens of completions: checked as rollouts arrive, and given advantages by the run's scaler.

A scaler gets its own copies of what it reads, and its result is checked. One of the form ``scale(inputs)`` may
return a number for each turn or token. They become advantages of tokens; tokens that the model did not write
have 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs, AdvantageScaler, CallFailure, Episode, Rollout, Turn
from grpox.errors import RunFailed, shorten
from grpox.plugins.component import takes_inputs
from grpox.plugins.component_state import odd_part
from grpox.rollout.rewards.scoring import ScoredRow
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
        """Tell which groups of `size` completions have no advantage other than 0."""
        tokens = list(self.values) if self.tokens is None else self.tokens
        zero = [bool((each.abs() <= ZERO).all()) for each in tokens]
        return [all(zero[start : start + size]) for start in range(0, len(zero), size)]

    def of_rows(self, rows: Sequence[int]) -> list[np.ndarray]:
        """List the advantages of the tokens of some completions, f32[T_i] each."""
        assert self.tokens is not None
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
    """Labels of the reward functions, K."""


class BatchScaler:
    """The run's scaler, and which of the two forms it has."""

    def __init__(self, scaler: AdvantageScaler) -> None:
        self.method: Callable[..., Any] = scaler.scale
        self.name = type(scaler).__name__
        self.takes_inputs = bool(takes_inputs(scaler))
        self._per: str = getattr(scaler, "per", "completion") if self.takes_inputs else "completion"

    def scale_inputs(self, batch: ScoredBatch) -> Advantages:
        """Call a scaler of the form ``scale(inputs)``; one number per completion is not checked yet.

        Raises:
            RunFailed: the scaler raised, or returned anything else than one tensor of finite numbers for each
                completion, where it declares advantages of turns or tokens.
        """
        scaled = call("advantage", self.method, _inputs(batch))
        if self._per == "completion":
            return Advantages(scaled)
        return self._of_tokens(scaled, [row.rollout for row in batch.rows])

    def _of_tokens(self, scaled: Any, rollouts: Sequence[Rollout]) -> Advantages:
        """Check one tensor a completion and spread it over the tokens."""
        if not isinstance(scaled, list | tuple) or len(scaled) != len(rollouts):
            what = f"{len(scaled)} values" if isinstance(scaled, list | tuple) else _described(scaled)
            raise RunFailed(
                f"advantage '{self.name}' returned {what}; per '{self._per}' is a list of {len(rollouts)} "
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
        whose = f"advantage '{self.name}' returned %s for sample {rollout.sample} of group {rollout.group_id}"
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


def check_content(rollout: Rollout, generator: str, vocabulary: int | None = None) -> None:
    """Refuse a rollout whose fields contradict each other or the model.

    Args:
        generator: its name in messages.
        vocabulary: as of `rollout_problem`.

    Raises:
        RunFailed: tokens, finish reason, log-probabilities, mask, turns, extra or episode are not as
            `grpox.contracts.Rollout` has them.
    """
    if problem := rollout_problem(rollout, vocabulary):
        where = f"group {rollout.group_id}, sample {rollout.sample}"
        raise RunFailed(f"generator '{generator}' returned a rollout ({where}) whose {problem}")


def rollout_problem(rollout: Rollout, vocabulary: int | None = None) -> str:
    """Describe the first field of a rollout that does not fit the others; empty if all do.

    Args:
        vocabulary: number of tokens that the model knows; None: accept any token.
    """
    ids: Any = rollout.completion_ids  # a generator may give anything
    logprobs: Any = rollout.sampler_logprobs
    if not hasattr(ids, "__len__"):
        return f"completion_ids is a {type(ids).__name__} and no tuple of token ids"
    count, mask = len(ids), rollout.model_mask
    if not count:
        return "completion_ids is empty: the tokens that the model wrote are needed, an ending EOS included"
    if not _is_reason(rollout.finish_reason):
        return f"finish_reason is {rollout.finish_reason!r} and no text"
    for token in ids:
        if not hasattr(token, "__index__") or token < 0:
            return f"completion_ids has {token!r}, which is no token id"
        if vocabulary is not None and token >= vocabulary:
            return f"completion_ids has {token!r}, but the model's tokens are 0 to {vocabulary - 1}"
    for name in ("model_mask", "sampler_logprobs"):
        values = getattr(rollout, name)
        if values is not None and len(values) != count:
            return f"{name} has {len(values)} values for {count} completion tokens"
    for value in () if logprobs is None else logprobs:
        if not hasattr(value, "__float__"):
            return f"sampler_logprobs has {value!r}, which is no number"
    if mask is not None and not any(mask):
        return "model_mask is False for every token: the model wrote none"
    return (
        (_turns_problem(rollout) if rollout.turns else "")
        or (_plain_problem(rollout.extra, "extra") if rollout.extra else "")
        or (_episode_problem(rollout.episode, rollout) if rollout.episode is not None else "")
    )


def _is_reason(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason)


def _turns_problem(rollout: Rollout) -> str:
    count, end = len(rollout.completion_ids), 0
    written = [False] * count
    for place, turn in enumerate(rollout.turns):
        if not end <= turn.start < turn.end <= count:
            return f"turn {place} is tokens {turn.start} to {turn.end}, after token {end} and of {count}"
        if not _is_reason(turn.finish_reason):
            return f"turn {place} has the finish_reason {turn.finish_reason!r} and no text"
        if turn.reward is not None and not math.isfinite(turn.reward):
            return f"turn {place} has the reward {turn.reward}; it is finite, or None"
        end = turn.end
        written[turn.start : end] = [True] * (end - turn.start)
    mask = [True] * count if rollout.model_mask is None else [bool(each) for each in rollout.model_mask]
    if written == mask:
        return ""
    place = next(place for place in range(count) if written[place] != mask[place])
    where = "in a turn" if written[place] else "in no turn"
    return f"model_mask is {mask[place]} at token {place}, which is {where}"


def _episode_problem(episode: Episode, rollout: Rollout) -> str:
    """Find what is wrong with the conversation of a rollout."""
    turns = len(turns_of(rollout))
    for message in episode.messages:
        if not (type(message) is dict and isinstance(message.get("role"), str)):
            return f"episode has the message {shorten(repr(message), 60)}, which is no dict with a role"
    for result in episode.results:
        if not 0 <= result.turn < turns:
            return f"episode has a call of tool {result.call.name!r} in turn {result.turn} of {turns}"
        if result.failure not in get_args(CallFailure):
            allowed = ", ".join(filter(None, get_args(CallFailure)))
            return f"episode has a call of tool with failure {result.failure!r}; it is {allowed} or empty"
    if episode.times and len(episode.times) != turns:
        return f"episode has times of {len(episode.times)} turns, and there are {turns}"
    if not math.isfinite(episode.weight):
        return f"episode has the weight {episode.weight}"
    parts = episode.rewards or {}
    if any(type(value) not in (int, float) for value in parts.values()):
        return f"episode.rewards is {shorten(repr(parts), 60)}, not numbers by name"
    plain = {"messages": list(episode.messages), "rewards": parts, "info": episode.info}
    return next(filter(None, (_plain_problem(value, f"episode.{name}") for name, value in plain.items())), "")


def _plain_problem(value: Any, name: str) -> str:
    """Find the first value that is not plain: checkpoints and the record hold plain values alone."""
    if (odd := odd_part(value, name)) is None:
        return ""
    given = f"{shorten(repr(odd[1]), 60)} ({type(odd[1]).__name__})"
    return f"{odd[0]} is {given}: it holds texts, numbers, None, and lists and dicts by text of these"
