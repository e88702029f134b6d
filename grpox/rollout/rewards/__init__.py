"""Calling reward functions and checking what they return."""

from grpox.rollout.rewards.named import NamedReward
from grpox.rollout.rewards.scoring import RewardTable, column_problems, score

__all__ = ["NamedReward", "RewardTable", "column_problems", "score"]
