"""Dynamic sampling: groups that teach nothing are replaced by groups of prompts that are drawn anew.

A group whose advantages are all 0 leaves the batch smaller than it looks. The scaler says by its `signal` what
it reads: equal rewards tell such a group, or the scaler itself is asked. Each round samples as many new groups
as there are such; those of the new ones that tell completions apart take their places, in the order in which
they were drawn. What is left when the rounds are used up stays. Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from grpox.contracts import AdvantageScaler
from grpox.errors import RunFailed
from grpox.plugins.component import takes_inputs
from grpox.rollout.metrics import has_uniform_rewards
from grpox.rollout.rewards.scoring import Logged, ScoredRow, weighed_mean_logged, weighted_sum

SIGNALS = ("sum", "functions", "all")
"""Values of a scaler's attribute `signal`."""

Draw = Callable[[int], Sequence[int]]
"""Function that returns the dataset indices of the next prompts, given their number."""
FindFlat = Callable[[Sequence[int], Sequence[Sequence[ScoredRow]]], Sequence[bool]]
"""Function of the dataset indices of groups and of their rows that tells which have no advantage."""


@dataclass(frozen=True)
class SampledGroups:
    """Groups of completions with their scores."""

    indices: Sequence[int]
    """Dataset index of each group's prompt."""
    groups: Sequence[Sequence[ScoredRow]]
    """In order of group and sample; group g is that of indices[g]."""
    logged: Logged

    @classmethod
    def of(cls, indices: Sequence[int], rows: Sequence[ScoredRow], logged: Logged) -> SampledGroups:
        """Rows in order of group, all groups of the same size."""
        size = len(rows) // len(indices)
        return cls(indices, [rows[start : start + size] for start in range(0, len(rows), size)], logged)

    @property
    def rows(self) -> list[ScoredRow]:
        return [row for group in self.groups for row in group]


def signal_of(scaler: AdvantageScaler) -> str:
    """Return what differs within a group from which the scaler makes advantages, one of `SIGNALS`.

    Raises:
        RunFailed: it declares something else.
    """
    signal = getattr(scaler, "signal", "all" if takes_inputs(scaler) else "sum")
    if signal not in SIGNALS:
        what = f"advantage '{type(scaler).__name__}' has signal = {signal!r}; it is {', '.join(SIGNALS)}"
        raise RunFailed(what)
    return str(signal)


def is_flat(rewards: Tensor, weights: Tensor, signal: str) -> bool:
    """Return True for a group from which a scaler with this `signal`, sum or functions, makes no advantages.

    Args:
        rewards: f32[G, K], NaN where a function abstained.
        weights: f32[K].
    """
    if signal == "functions":
        return bool(has_uniform_rewards(rewards[:, weights != 0].T).all())
    return bool(has_uniform_rewards(weighted_sum(rewards, weights).float().unsqueeze(0)))


SampleGroups = Callable[[int, Sequence[int]], SampledGroups]
"""Number of the round from 1, dataset indices of its prompts -> their groups."""


@dataclass(frozen=True)
class ResampledBatch:
    """A generation batch with what could be replaced in it."""

    batch: SampledGroups
    dropped: Sequence[ScoredRow]
    """Completions that were sampled and are no part of it."""
    metrics: Mapping[str, float]


def refill(
    first: SampledGroups, rounds: int, draw: Draw, sample: SampleGroups, find_flat: FindFlat
) -> ResampledBatch:
    """Replace the flat groups of `first` in at most `rounds` rounds; a collective.

    Args:
        draw, sample: what they return is the same on every rank, and so every rank replaces the same.
    """
    indices, groups = list(first.indices), list(first.groups)
    logs = [(first.logged, len(first.rows))]
    flat = [place for place, silent in enumerate(find_flat(indices, groups)) if silent]
    done, drawn, wanted = 0, len(groups), len(flat)
    dropped: list[ScoredRow] = []
    while flat and done < rounds:
        done, drawn = done + 1, drawn + len(flat)
        sampled = sample(done, draw(len(flat)))
        logs.append((sampled.logged, len(sampled.rows)))
        # Among the others of the batch, as a scaler may compare groups.
        are_silent = find_flat([*indices, *sampled.indices], [*groups, *sampled.groups])[len(groups) :]
        for index, group, silent in zip(sampled.indices, sampled.groups, are_silent, strict=True):
            if silent:
                dropped += group
                continue
            place = flat.pop(0)
            dropped += groups[place]
            moved = [replace(row, rollout=replace(row.rollout, group_id=place)) for row in group]
            indices[place], groups[place] = index, moved
    metrics = {
        "dynamic_sampling/rounds": float(done),
        "dynamic_sampling/replaced": (wanted - len(flat)) / len(groups),
        "dynamic_sampling/prompts": float(drawn),
    }
    return ResampledBatch(SampledGroups(indices, groups, weighed_mean_logged(logs)), dropped, metrics)
