"""Checks of the keys of `train`, and of streamed data, against the rest of a run file."""

from __future__ import annotations

from collections.abc import Mapping

from grpox.config import RunConfig
from grpox.contracts import Capability
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.plugins.discovery import Offer
from grpox.runfile.sampling_bias import changed_distribution

OFF_POLICY = "train.off_policy_mask_threshold"
STALENESS = "train.max_staleness"
DYNAMIC_SAMPLING = "train.dynamic_sampling_rounds"


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
    if generator is not None and Capability.LOGPROBS not in generator.provides:
        what = f"{generator} does not say that it reports log-probabilities"
        problems.append(Problem(what, key, given="generator", allowed=allowed))
    if correction is not None and Capability.LOGPROBS in correction.needs:
        what = f"{correction} would correct nothing: the ratio itself is to the generator's probabilities"
        problems.append(Problem(what, "correction", allowed="none"))
    if given := changed_distribution(config.sampling):
        what = "the generator's log-probabilities are those of another distribution than the trainer's"
        problems.append(Problem(what, key, given=f"sampling with {', '.join(given)}", allowed=allowed))
    return problems


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
    if generator is not None and Capability.LOGPROBS not in generator.provides:
        what = f"{generator} does not say that it reports log-probabilities"
        problems.append(Problem(what, OFF_POLICY, given=f"{threshold:g}", allowed="null"))
    if biased := changed_distribution(config.sampling):
        what = "the generator's log-probabilities are those of another distribution than the trainer's"
        problems.append(Problem(what, OFF_POLICY, given=f"sampling with {', '.join(biased)}", allowed="null"))
    return problems


def staleness_problems(
    config: RunConfig, components: Mapping[str, BoundComponent], offers: list[Offer]
) -> list[Problem]:
    """Why samples cannot be one generation batch old.

    Args:
        components: those that could be bound, by key.
        offers: what is installed, for the names of generators that could.
    """
    if config.train.max_staleness == 0:
        return []
    given, problems = str(config.train.max_staleness), []
    generator, correction = components.get("generator"), components.get("correction")
    if generator is not None and Capability.AHEAD not in generator.provides:
        able = [
            offer.spec.name
            for offer in offers
            if offer.kind == "generator" and Capability.AHEAD in offer.spec.provides
        ]
        allowed = " or ".join(["0", *(f"with generator {name}" for name in able)])
        what = f"{generator} does not sample while the policy is updated"
        problems.append(Problem(what, STALENESS, given=given, allowed=allowed))
    if (
        correction is not None
        and Capability.LOGPROBS not in correction.needs
        and config.train.old_logprobs == "policy"
    ):
        problems.append(_uncorrected(config, correction, given))
    return problems


def _uncorrected(config: RunConfig, correction: BoundComponent, given: str) -> Problem:
    what = f"{correction} leaves uncorrected that the samples are of an earlier policy"
    if biased := changed_distribution(config.sampling):
        given = f"{given}, sampling with {', '.join(biased)}, for which there is no correction"
        return Problem(what, STALENESS, given=given, allowed="0")
    allowed = "0, or a correction such as token-truncate, or train.old_logprobs: generator"
    return Problem(what, STALENESS, given=given, allowed=allowed)


def dynamic_sampling_problems(config: RunConfig) -> list[Problem]:
    """Keys that do not go with generation batches that take as many prompts as they turn out to need."""
    rounds, train = config.train.dynamic_sampling_rounds, config.train
    if rounds is None:
        return []
    problems = []
    if train.max_steps < 0:
        needs = "a generation batch takes as many prompts as it needs"
        what = f"with {DYNAMIC_SAMPLING} {needs}: say how many steps to take"
        problems.append(Problem(what, "train.max_steps", given=str(train.max_steps), allowed="at least 0"))
    if train.max_staleness > 0:
        what = "groups to be replaced are known when all are scored, after the updates they were sampled during"
        allowed = "null, or train.max_staleness: 0"
        problems.append(Problem(what, DYNAMIC_SAMPLING, given=str(rounds), allowed=allowed))
    return problems


def stream_problems(config: RunConfig, streamed: bool = False) -> list[Problem]:
    """Keys that do not go with streamed data.

    Args:
        streamed: the data is a stream whatever `data.streaming` says: an IterableDataset.
    """
    if not (config.data.streaming or streamed):
        return []
    problems = []
    steps = config.train.max_steps
    if steps <= 0:
        what = "streamed data has no known length: say how many steps to take"
        problems.append(Problem(what, "train.max_steps", given=str(steps), allowed="at least 1"))
    if "[" in config.data.split:
        what = "a stream cannot be cut into parts"
        allowed = config.data.split.partition("[")[0] + ", or streaming: false"
        problems.append(Problem(what, "data.split", given=config.data.split, allowed=allowed))
    return problems
