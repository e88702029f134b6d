"""Checks that the fields of a rollout fit its tokens."""

from __future__ import annotations

from grpox.contracts import Rollout


def rollout_problem(rollout: Rollout) -> str:
    """Describe the first field of a rollout that does not fit its tokens; empty if all do."""
    count = len(rollout.completion_ids)
    for name in ("model_mask", "sampler_logprobs"):
        values = getattr(rollout, name)
        if values is not None and len(values) != count:
            return f"{name} has {len(values)} values for {count} completion tokens"
    end = 0
    for place, turn in enumerate(rollout.turns):
        if not end <= turn.start < turn.end <= count:
            return f"turn {place} is tokens {turn.start} to {turn.end}, after token {end} and of {count}"
        end = turn.end
    return ""
