"""Reward functions: bound, called, and what they return checked.

`isolation` builds the functions that a run file lists, in the trainer or in processes of their own, and binds
them; `scoring` scores a batch by all of them, which `named` calls at once. `call` runs one in a thread with its
timeout, and checks what it returns; `process` talks to the program `worker`.
"""

from grpox.rollout.rewards.named import NamedReward

__all__ = ["NamedReward"]
