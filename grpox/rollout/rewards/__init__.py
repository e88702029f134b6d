"""Reward functions: bound, called, and what they return checked.

`fitting` binds the functions that a run file lists, `scoring` scores a batch by all of them, which `named`
calls at once. `call` runs one in a thread with its timeout, and checks what it returns; `isolation` decides
which get a process of their own, where `process` talks to the program `worker`.
"""

from grpox.rollout.rewards.named import NamedReward
from grpox.rollout.rewards.scoring import RewardTable, column_problems, score

__all__ = ["NamedReward", "RewardTable", "column_problems", "score"]
