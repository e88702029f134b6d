"""Checks of the keys of `train`, and of streamed data, against the rest of a run file."""

from __future__ import annotations

from collections.abc import Iterator

from grpox.config import RunConfig
from grpox.contracts import Capability
from grpox.errors import Problem
from grpox.plugins.component import BoundComponent
from grpox.runfile.check_context import CheckContext

OFF_POLICY = "train.off_policy_mask_threshold"
STALENESS = "train.max_staleness"
DYNAMIC_SAMPLING = "train.dynamic_sampling_rounds"
OTHER_DISTRIBUTION = "the generator's log-probabilities are those of another distribution than the trainer's"


def old_logprobs_problems(context: CheckContext) -> Iterator[Problem]:
    """Why the ratio cannot be that to the generator's probabilities."""
    if context.config.train.old_logprobs == "policy":
        return
    key, correction = "train.old_logprobs", context.correction
    yield from _without_logprobs(context, key, "generator", "policy")
    if correction is not None and Capability.LOGPROBS in correction.needs:
        what = f"{correction} would correct nothing: the ratio itself is to the generator's probabilities"
        yield Problem(what, "correction", allowed="none")
    if context.changed_sampling:
        yield Problem(OTHER_DISTRIBUTION, key, given=context.changed_sampling, allowed="policy")


def off_policy_problems(context: CheckContext) -> Iterator[Problem]:
    """Why it cannot be told how far the policy is from the generator."""
    threshold = context.config.train.off_policy_mask_threshold
    if threshold is None:
        return
    yield from _without_logprobs(context, OFF_POLICY, f"{threshold:g}", "null")
    if context.changed_sampling:
        yield Problem(OTHER_DISTRIBUTION, OFF_POLICY, given=context.changed_sampling, allowed="null")


def _without_logprobs(context: CheckContext, key: str, given: str, allowed: str) -> Iterator[Problem]:
    if context.generator is not None and Capability.LOGPROBS not in context.generator.provides:
        what = f"{context.generator} does not say that it reports log-probabilities"
        yield Problem(what, key, given=given, allowed=allowed)


def staleness_problems(context: CheckContext) -> Iterator[Problem]:
    """Why samples cannot be one generation batch old."""
    train, generator, correction = context.config.train, context.generator, context.correction
    if train.max_staleness == 0:
        return
    given = str(train.max_staleness)
    if generator is not None and Capability.AHEAD not in generator.provides:
        able = [
            offer.spec.name
            for offer in context.plugins.offers
            if offer.kind == "generator" and Capability.AHEAD in offer.spec.provides
        ]
        allowed = " or ".join(["0", *(f"with generator {name}" for name in able)])
        what = f"{generator} does not sample while the policy is updated"
        yield Problem(what, STALENESS, given=given, allowed=allowed)
    uncorrected = correction is not None and Capability.LOGPROBS not in correction.needs
    if correction is not None and uncorrected and train.old_logprobs == "policy":
        yield _uncorrected(context, correction, given)


def _uncorrected(context: CheckContext, correction: BoundComponent, given: str) -> Problem:
    what = f"{correction} leaves uncorrected that the samples are of an earlier policy"
    if context.changed_sampling:
        given = f"{given}, {context.changed_sampling}, for which there is no correction"
        return Problem(what, STALENESS, given=given, allowed="0")
    allowed = "0, or a correction such as token-truncate, or train.old_logprobs: generator"
    return Problem(what, STALENESS, given=given, allowed=allowed)


def dynamic_sampling_problems(context: CheckContext) -> Iterator[Problem]:
    """Keys that do not go with generation batches that take as many prompts as they turn out to need."""
    train = context.config.train
    rounds = train.dynamic_sampling_rounds
    if rounds is None:
        return
    if train.max_steps < 0:
        needs = "a generation batch takes as many prompts as it needs"
        what = f"with {DYNAMIC_SAMPLING} {needs}: say how many steps to take"
        yield Problem(what, "train.max_steps", given=str(train.max_steps), allowed="at least 0")
    if train.max_staleness > 0:
        what = "groups to be replaced are known when all are scored, after the updates they were sampled during"
        allowed = "null, or train.max_staleness: 0"
        yield Problem(what, DYNAMIC_SAMPLING, given=str(rounds), allowed=allowed)


def stream_problems(config: RunConfig) -> Iterator[Problem]:
    """Keys that do not go with streamed data."""
    steps, split = config.train.max_steps, config.data.split
    if steps <= 0:
        what = "streamed data has no known length: say how many steps to take"
        yield Problem(what, "train.max_steps", given=str(steps), allowed="at least 1")
    if "[" in split:
        allowed = split.partition("[")[0] + ", or streaming: false"
        yield Problem("a stream cannot be cut into parts", "data.split", given=split, allowed=allowed)


def streamed_data_problems(context: CheckContext) -> Iterator[Problem]:
    """The same, where the data is streamed: as `data.streaming` says, or an IterableDataset in Python."""
    if context.config.data.streaming or context.given.streamed:
        yield from stream_problems(context.config)
