"""The scores of a batch by function, for tests that look at one function after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpox.contracts import Rollout, ScoredRollout
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import RewardInputs, reward_matrix, score_rollouts, weighted_sum


@dataclass
class RewardTable:
    """Scores [K][N], whether they failed, and what the functions logged."""

    values: list[list[float | None]]
    failed: list[list[bool]]
    metrics: dict[str, dict[str, float]]
    extra_columns: dict[str, list[Any]]
    warnings: dict[str, str]


def row_of(
    rollout: Rollout,
    rewards: Mapping[str, float | None],
    weights: Sequence[float] | None = None,
    failed: tuple[str, ...] = (),
) -> ScoredRollout:
    """Return a scored rollout without texts; all weights are 1 by default."""
    scores = reward_matrix([rewards.values()])
    weighed = weighted_sum(scores, torch.tensor(weights or [1.0] * len(rewards)))
    return ScoredRollout(rollout, "", "", rewards, weighed.item(), math.nan, failed=failed)


def score(
    rewards: Sequence[NamedReward],
    prompts: Any,
    completions: Any,
    completion_ids: Any,
    columns: Mapping[str, list[Any]],
    state: Any = None,
) -> RewardTable:
    """Score completions; arguments as reward functions get them."""
    rollouts = [Rollout(0, place, (1,), tuple(ids), "stop", 0) for place, ids in enumerate(completion_ids)]
    arguments = {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(ids) for ids in completion_ids],
    }
    rows, notes = score_rollouts(rewards, RewardInputs(rollouts, completions, arguments), state)
    return RewardTable(
        [[row.rewards[reward.label] for row in rows] for reward in rewards],
        [[reward.label in row.failed for row in rows] for reward in rewards],
        {name: dict(by_label) for name, by_label in notes.logged.items()},
        {name: [row.extra[name] for row in rows] for name in (rows[0].extra if rows else ())},
        dict(notes.warnings),
    )
