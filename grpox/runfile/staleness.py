"""What `train.max_staleness` asks of the run file: a generator that samples ahead, and a correction."""

from __future__ import annotations

from collections.abc import Mapping

from grpox.config import RunConfig
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.plugins.discovery import Offer
from grpox.runfile.old_logprobs import LOGPROBS
from grpox.runfile.sampling_bias import changed_distribution

AHEAD = "ahead"
"""What a generator provides that has `begin`: it samples in the background while the policy is updated."""
KEY = "train.max_staleness"


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
    if generator is not None and AHEAD not in generator.provides:
        able = [
            offer.spec.name for offer in offers if offer.kind == "generator" and AHEAD in offer.spec.provides
        ]
        allowed = " or ".join(["0", *(f"with generator {name}" for name in able)])
        what = f"{generator} does not sample while the policy is updated"
        problems.append(Problem(what, KEY, given=given, allowed=allowed))
    if correction is not None and LOGPROBS not in correction.needs and config.train.old_logprobs == "policy":
        problems.append(_uncorrected(config, correction, given))
    return problems


def _uncorrected(config: RunConfig, correction: BoundComponent, given: str) -> Problem:
    what = f"{correction} leaves uncorrected that the samples are of an earlier policy"
    if biased := changed_distribution(config.sampling):
        given = f"{given}, sampling with {', '.join(biased)}, for which there is no correction"
        return Problem(what, KEY, given=given, allowed="0")
    allowed = "0, or a correction such as token-truncate, or train.old_logprobs: generator"
    return Problem(what, KEY, given=given, allowed=allowed)
