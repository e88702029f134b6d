"""A generation batch that was begun, as plain tensors: a resumed run does not sample it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpox.contracts import Rollout
from grpox.rollout.prefetch import Begun


def begun_state(begun: Begun) -> dict[str, Any]:
    """Waits until it is sampled."""
    return {"version": begun.version, "rollouts": [_rollout_state(rollout) for rollout in begun]}


def begun_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> Begun:
    """What `rank` of `size` has of a batch.

    Args:
        states: what `begun_state` gave on each rank that it was saved by, or on this rank alone.
    """
    rollouts = [_rollout(each) for state in states for each in state["rollouts"]]
    return Begun(states[0]["version"], [rollout for rollout in rollouts if rollout.group_id % size == rank])


def _rollout_state(rollout: Rollout) -> dict[str, Any]:
    logprobs, mask = rollout.sampler_logprobs, rollout.model_mask
    return {
        "group_id": rollout.group_id,
        "sample": rollout.sample,
        "prompt_ids": torch.tensor(rollout.prompt_ids, dtype=torch.int64),
        "completion_ids": torch.tensor(rollout.completion_ids, dtype=torch.int64),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "sampler_logprobs": None if logprobs is None else torch.tensor(logprobs, dtype=torch.float64),
        "model_mask": None if mask is None else torch.tensor(mask, dtype=torch.bool),
    }


def _rollout(state: Mapping[str, Any]) -> Rollout:
    plain: dict[str, Any] = {
        name: tuple(value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    return Rollout(**plain)
