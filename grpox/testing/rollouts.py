"""Checks of one rollout: what a mask, a log-probability, an end or a turn says must fit the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpox.contracts import Rollout
from grpox.rollout.turns import rollout_problem
from grpox.testing.conformance import require

ROUNDING = 1e-3
"""Largest log-probability that is still 0 but for rounding."""


def check_rollout(rollout: Rollout, version: int) -> None:
    """Check a rollout that weights of `version` have just sampled, apart from its end.

    Raises:
        Violation: its mask, log-probabilities, versions or turns do not fit its tokens.
    """
    require(not (problem := rollout_problem(rollout)), f"a rollout's {problem}", rollout)
    mask = rollout.model_mask or (True,) * len(rollout.completion_ids)
    advice = "model_mask is True for tokens that the model wrote, the ending EOS included; None: it wrote all"
    has_all = rollout.finish_reason != "stop" or mask[-1]
    require(has_all, "a rollout's model_mask leaves out the EOS that the model wrote", rollout, advice)
    _check_log_probabilities(rollout, mask)
    what = f"after a sync of version {version} a rollout is of version {rollout.policy_version}"
    require(rollout.policy_version == version, what, rollout, "keep the version that sync() is given")
    _check_turns(rollout)


def _check_log_probabilities(rollout: Rollout, mask: Sequence[bool]) -> None:
    values = rollout.sampler_logprobs
    if values is None:
        return
    written = [value for value, is_model in zip(values, mask, strict=True) if is_model]
    advice = "log-probabilities are finite and at most 0"
    sound = all(math.isfinite(value) and value <= ROUNDING for value in written)
    require(sound, "a rollout has a sampler log-probability that is none", rollout, advice)


def _check_turns(rollout: Rollout) -> None:
    """Check that the turns are of versions up to the rollout's, and that the last ended as it did."""
    if not rollout.turns:
        return
    versions = [turn.policy_version for turn in rollout.turns]
    what = f"turns of versions {versions} are in a rollout of version {rollout.policy_version}"
    require(max(versions) <= rollout.policy_version, what, rollout)
    same = rollout.turns[-1].finish_reason == rollout.finish_reason
    is_own = rollout.finish_reason in ("stop", "length")
    what = (
        f"the last turn ended by {rollout.turns[-1].finish_reason!r}, the rollout by {rollout.finish_reason!r}"
    )
    require(same or not is_own, what, rollout)
