"""Reward functions: built, bound to the data, called, and their results checked.

`isolation` builds the functions that a run file lists, in the trainer or in processes of their own, and binds
them; `scoring` scores a batch by all of them, and `named` calls them at once, with their timeouts. `call` makes
one call and checks its result; `process` talks to the program `worker`.
"""

from grpox.rollout.rewards.named import NamedReward

__all__ = ["NamedReward"]
