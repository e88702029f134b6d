"""Reward functions with the names that metrics call them by, checked against the columns of their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpox.config import RewardRef, labels_of
from grpox.errors import ConfigError
from grpox.rollout.rewards.isolation import OF_TRAINING
from grpox.rollout.rewards.named import NamedReward
from grpox.rollout.rewards.scoring import column_problems

if TYPE_CHECKING:
    from grpox.data.prompts import PromptSet


def fitting_rewards(
    refs: Sequence[RewardRef], functions: Sequence[Any], prompts: PromptSet, key: str = OF_TRAINING
) -> list[NamedReward]:
    """The functions that `refs` name, as a run calls them.

    Args:
        functions: in the same order.
        prompts: the data that they are to score.
        key: under which the run file lists them.

    Raises:
        ConfigError: a function needs a column that the data lacks.
    """
    rewards = [
        NamedReward(label, function, ref.weight, ref.on_error, ref.timeout)
        for label, function, ref in zip(labels_of(refs), functions, refs, strict=True)
    ]
    if problems := column_problems(rewards, prompts.column_names, key, prompts.data):
        raise ConfigError(problems)
    return rewards
