"""Dynamic sampling: groups that teach nothing are replaced by groups of prompts that are drawn anew.

A group whose rewards are all equal has no advantage, and leaves the batch smaller than it looks. Each round
samples as many new groups as there are such; those of the new ones that tell completions apart take their
places, in the order in which they were drawn. What is left when the rounds are used up stays. Source: DAPO,
arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpox.rollout.rewards.scoring import Logged, ScoredRow, weighed_mean_logged

Draw = Callable[[int], Sequence[int]]
"""Function that returns the dataset indices of the next prompts, given their number."""
IsFlat = Callable[[Sequence[ScoredRow]], bool]
"""Function that tells whether the rewards of a group are all equal."""


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
    first: SampledGroups, rounds: int, draw: Draw, sample: SampleGroups, is_flat: IsFlat
) -> ResampledBatch:
    """Replace the flat groups of `first` in at most `rounds` rounds; a collective.

    Args:
        draw, sample: what they return is the same on every rank, and so every rank replaces the same.
    """
    indices, groups = list(first.indices), list(first.groups)
    logs = [(first.logged, len(first.rows))]
    flat = [place for place, group in enumerate(groups) if is_flat(group)]
    done, drawn, wanted = 0, len(groups), len(flat)
    dropped: list[ScoredRow] = []
    while flat and done < rounds:
        done, drawn = done + 1, drawn + len(flat)
        sampled = sample(done, draw(len(flat)))
        logs.append((sampled.logged, len(sampled.rows)))
        for index, group in zip(sampled.indices, sampled.groups, strict=True):
            if is_flat(group):
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
