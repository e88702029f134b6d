"""The scores of a batch by function, for tests that look at one function after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpox.contracts import Rollout
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.scoring import Unscored, score_rows


@dataclass
class RewardTable:
    """Scores [K][N], whether they failed, and what the functions logged."""

    values: list[list[float | None]]
    failed: list[list[bool]]
    metrics: dict[str, dict[str, float]]
    extra_columns: dict[str, list[Any]]
    warnings: dict[str, str]


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
    scored = score_rows(rewards, Unscored(rollouts, prompts, completions, dict(columns), completions), state)
    rows = scored.rows
    return RewardTable(
        [[row.rewards[place] for row in rows] for place in range(len(rewards))],
        [[row.failed[place] for row in rows] for place in range(len(rewards))],
        scored.logged,
        {name: [row.extra[name] for row in rows] for name in (rows[0].extra if rows else ())},
        scored.warnings,
    )
