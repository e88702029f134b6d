"""Checks of a run's components against its settings, and of the plugins that its run file requires."""

from __future__ import annotations

from collections.abc import Iterator

from grpox.contracts import Capability
from grpox.errors import Problem, join
from grpox.plugins.requirements import canonical_name, unmet
from grpox.runfile.check_context import CheckContext
from grpox.runfile.sampling_bias import NEUTRAL


def missing_plugins(context: CheckContext) -> Iterator[Problem]:
    """Requirements of ``plugins.required``, such as ``grpox-foo>=1.2``, that no loaded plugin meets."""
    from packaging.requirements import Requirement

    for position, requirement in enumerate(context.config.plugins.required):
        place = join("plugins.required", position)
        if reason := unmet(requirement):
            yield Problem(reason, place, given=requirement)
            continue
        name = canonical_name(Requirement(requirement).name)
        records = [record for record in context.plugins.records if canonical_name(record.distribution) == name]
        if not records:
            yield Problem("installed, but holds no grpox plugin", place, given=requirement)
        for record in records:
            if record.status != "ok":
                yield Problem(f"{record} is {record.status}: {record.reason}", place, given=requirement)


def biased_correction(context: CheckContext) -> Iterator[Problem]:
    """Refuse a correction under sampling that changes the distribution: mu is changed, pi_old is not."""
    correction = context.correction
    if correction is None or not context.changed_sampling or Capability.LOGPROBS not in correction.needs:
        return
    neutral = ", ".join(f"{name} {value:g}" for name, value in NEUTRAL.items())
    yield Problem(
        f"{correction} would be biased: the generator's log-probabilities are those of the distribution it "
        "samples from, which these settings make another than the trainer's",
        key="correction",
        given=context.changed_sampling,
        allowed=f"correction none, or sampling with {neutral} and no generation_kwargs that change logits",
    )


def refused_sampling(context: CheckContext) -> Iterator[Problem]:
    """Ask the generator's config what it cannot honour; see `grpox.contracts.Generator`."""
    for name, argument in (("check_sampling", context.config.sampling), ("check_run", context.config)):
        check = getattr(context.generator and context.generator.config, name, None)
        yield from () if check is None else check(argument)
