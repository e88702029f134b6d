"""What `train.old_logprobs: generator` asks of the rest of the run file."""

from __future__ import annotations

from collections.abc import Mapping

from grpox.config import RunConfig
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.runfile.sampling_bias import changed_distribution

LOGPROBS = "logprobs"


def old_logprobs_problems(config: RunConfig, components: Mapping[str, BoundComponent]) -> list[Problem]:
    """Why the ratio cannot be that to the generator's probabilities.

    Args:
        components: those that could be bound, by key.
    """
    if config.train.old_logprobs == "policy":
        return []
    key, allowed = "train.old_logprobs", "policy"
    problems = []
    generator, correction = components.get("generator"), components.get("correction")
    if generator is not None and LOGPROBS not in generator.provides:
        what = f"{generator} does not say that it reports log-probabilities"
        problems.append(Problem(what, key, given="generator", allowed=allowed))
    if correction is not None and LOGPROBS in correction.needs:
        what = f"{correction} would correct nothing: the ratio itself is to the generator's probabilities"
        problems.append(Problem(what, "correction", allowed="none"))
    if given := changed_distribution(config.sampling):
        what = "the generator's log-probabilities are those of another distribution than the trainer's"
        problems.append(Problem(what, key, given=f"sampling with {', '.join(given)}", allowed=allowed))
    return problems
