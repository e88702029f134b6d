"""What `train.off_policy_mask_threshold` asks of the run file: what the generator thought of its own tokens."""

from __future__ import annotations

from collections.abc import Mapping

from grpox.config import RunConfig
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.runfile.old_logprobs import LOGPROBS
from grpox.runfile.sampling_bias import changed_distribution

KEY = "train.off_policy_mask_threshold"


def off_policy_problems(config: RunConfig, components: Mapping[str, BoundComponent]) -> list[Problem]:
    """Why it cannot be told how far the policy is from the generator.

    Args:
        components: those that could be bound, by key.
    """
    threshold = config.train.off_policy_mask_threshold
    if threshold is None:
        return []
    problems = []
    generator = components.get("generator")
    if generator is not None and LOGPROBS not in generator.provides:
        what = f"{generator} does not say that it reports log-probabilities"
        problems.append(Problem(what, KEY, given=f"{threshold:g}", allowed="null"))
    if biased := changed_distribution(config.sampling):
        what = "the generator's log-probabilities are those of another distribution than the trainer's"
        problems.append(Problem(what, KEY, given=f"sampling with {', '.join(biased)}", allowed="null"))
    return problems
