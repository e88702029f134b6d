"""Differences between two plugin locks or two resolved configs, how grave they are, and those across ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem
from grpox.errors.redaction import redacted
from grpox.plugins.requirements import canonical_name
from grpox.runfile.lock.model import Lock, LockedComponent, LockedDistribution
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from grpox.runtime.world import World

ABSENT = "-"
"""Shown in place of what one of the two has not."""
RESOLVED_CONFIG = "resolved config"
"""What differs where two locks have other hashes of the config, which does not say in which keys."""
FREE = ("output_dir", "logging", "checkpoint", "tracking", "hub", "plugins", "watchdog")
"""Sections of the run file that change nothing of what is computed."""
FREE_KEYS = ("train.on_nonfinite", "train.max_skips_in_a_row", "evaluation.early_stop")
"""Keys that are changed for a run that stopped to go on."""


class Severity(Enum):
    """The gravest first."""

    DRIFT = "drift"
    """A component of the same name is other code: results may differ, whatever the config says."""
    ENVIRONMENT = "environment"
    """Another version of Python or a library, or another plugin that observes unasked."""
    CONFIG = "config"
    """The run file asks for something else."""
    ORIGIN = "origin"
    """The same code from somewhere else: another commit, another kind of install, another folder."""


@dataclass(frozen=True)
class Difference:
    """One thing in which `new` is not `old`."""

    severity: Severity
    what: str
    """Distribution, component or library, and which of its properties: ``grpox-foo version``."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.what}: {self.old} -> {self.new}"


def differences(old: Lock, new: Lock, *severities: Severity) -> list[str]:
    """What differs, a line each, the gravest first: ``drift: grpox-foo version: 1.0 -> 1.1``.

    Args:
        severities: tell only of these; default: all. A run that resumes must not go on under a DRIFT unless
            its user allows it.
    """
    return [str(found) for found in compare(old, new) if not severities or found.severity in severities]


def compare(old: Lock, new: Lock) -> list[Difference]:
    """What differs, the gravest first. Two locks with one digest differ in nothing."""
    config = _changed(Severity.CONFIG, RESOLVED_CONFIG, old.config[:12], new.config[:12])
    return by_gravity([*_distributions(old, new), *_components(old, new), *_environment(old, new), *config])


def by_gravity(found: Iterable[Difference]) -> list[Difference]:
    """The gravest first, otherwise in the order given."""
    order = list(Severity)
    return sorted(found, key=lambda difference: order.index(difference.severity))


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The keys in which two resolved configs differ; ``output_dir`` is passed over, as in the lock's hash."""
    left, right = dict(_leaves(old)), dict(_leaves(new))
    return [
        found
        for key in dict.fromkeys([*left, *right])
        if key != "output_dir"
        for found in _changed(Severity.CONFIG, key, left.get(key, ABSENT), right.get(key, ABSENT))
    ]


def changes(saved: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """The keys by which `config` is another run's than the resolved config `saved`."""
    return [
        found
        for found in config_differences(redacted(saved), redacted(config.model_dump(mode="json")))
        if found.what.partition(".")[0].partition("[")[0] not in FREE and not found.what.startswith(FREE_KEYS)
    ]


def _leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no mapping or list with something in it."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list) and config:
        for place, value in enumerate(config):
            yield from _leaves(value, f"{key}[{place}]")
    else:
        yield key, config


def _changed(severity: Severity, what: str, old: object, new: object) -> Iterator[Difference]:
    """One difference where `old` and `new` are not the same, else none."""
    if old != new:
        shown = (ABSENT if value in (None, "") else str(value) for value in (old, new))
        yield Difference(severity, what, *shown)


def _distributions(old: Lock, new: Lock) -> Iterator[Difference]:
    """Those of both. One that only one of them has is told by the component that comes from it."""
    others = {canonical_name(name): held for name, held in new.distributions.items()}
    for name, before in old.distributions.items():
        if (after := others.get(canonical_name(name))) is None:
            continue
        yield from _changed(Severity.DRIFT, f"{name} version", before.version, after.version)
        yield from _changed(Severity.DRIFT, f"{name} plugin API", before.api, after.api)
        if before.sha256 == after.sha256:
            yield from _changed(Severity.ORIGIN, f"{name} commit", _commit(before), _commit(after))
            yield from _changed(Severity.ORIGIN, f"{name} origin", before.origin, after.origin)
            yield from _changed(Severity.ORIGIN, f"{name} editable", before.editable, after.editable)
        elif before.version == after.version:
            # Of another version the sources are others anyway: its numbers would say it twice.
            yield from _changed(Severity.DRIFT, f"{name} sources", _sources(before), _sources(after))


def _sources(held: LockedDistribution) -> str:
    hashed = f"{held.sha256[:12]} ({held.files} files)"
    return f"{hashed} at {_commit(held)}" if held.commit else hashed


def _commit(held: LockedDistribution) -> str:
    return (held.commit or "")[:12] + (" with changes" if held.dirty else "")


def _components(old: Lock, new: Lock) -> Iterator[Difference]:
    for key in dict.fromkeys([*old.components, *new.components]):
        before, after = old.components.get(key), new.components.get(key)
        if before and after and (before.name, before.given) == (after.name, after.given):
            yield from _component(key, before, after)
        else:
            held = [one for one in (before, after) if one is not None]
            unasked = len(held) == 1 and held[0].given == "unasked"
            severity = Severity.ENVIRONMENT if unasked else Severity.CONFIG
            yield from _changed(severity, key, _named(before), _named(after))


def _component(key: str, old: LockedComponent, new: LockedComponent) -> Iterator[Difference]:
    """Two components of one name: that their code or what it declares differs."""
    if canonical_name(old.distribution or "") != canonical_name(new.distribution or ""):
        yield from _changed(Severity.DRIFT, key, _named(old), _named(new))
        return
    if old.sha256 != new.sha256:
        files = (f"{held.target} {(held.sha256 or '')[:12]}" for held in (old, new))
        yield from _changed(Severity.DRIFT, f"{key} file", *files)
    else:
        severity = Severity.ORIGIN if old.given == "path" else Severity.DRIFT
        yield from _changed(severity, f"{key} target", old.target, new.target)
    for label in ("needs", "provides"):
        names = (", ".join(sorted(set(getattr(held, label)))) for held in (old, new))
        yield from _changed(Severity.DRIFT, f"{key} {label}", *names)


def _named(held: LockedComponent | None) -> str:
    if held is None:
        return ABSENT
    return f"{held.name} ({held.distribution})" if held.distribution else f"{held.name} (by {held.given})"


def _environment(old: Lock, new: Lock) -> Iterator[Difference]:
    yield from _changed(Severity.ENVIRONMENT, "plugin API", old.api, new.api)
    both = old.distributions.keys() & new.distributions.keys()
    for name in dict.fromkeys([*old.versions, *new.versions]):
        if name not in both:
            before, after = old.versions.get(name), new.versions.get(name)
            yield from _changed(Severity.ENVIRONMENT, f"{name} version", before, after)


def check_ranks(world: World, lock: Lock, config: Mapping[str, Any]) -> None:
    """Refuse a run whose ranks hold different code; a collective of all ranks.

    A config that differs is only a warning, on rank 0: an override may be one of that machine. Plugins that
    observe unasked are passed over, because observers are called on rank 0 alone.

    Args:
        lock: this rank's.
        config: this rank's resolved config.

    Raises:
        ConfigError: on every rank alike, with one problem for each difference to rank 0.
    """
    lock = lock.selected()
    told = world.gather([(lock.digest, socket.gethostname())])
    digests = [digest for digest, _ in told]
    if len(set(digests)) == 1:
        return
    # The first rank of each lock sends it, as text: another version of grpox may have other classes.
    speaks = digests.index(lock.digest) == world.rank
    texts = world.gather([json.dumps([lock.text(), config], default=str)] if speaks else [])
    sent = [(Lock.model_validate_json(text), held) for text, held in map(json.loads, texts)]
    problems, warnings = across_ranks(told, sent)
    for warning in warnings if world.is_main else ():
        get_logger(__name__).warning("%s", warning)
    if problems:
        raise ConfigError(problems)


def across_ranks(
    told: Sequence[tuple[str, str]], sent: Sequence[tuple[Lock, Mapping[str, Any]]]
) -> tuple[list[Problem], list[str]]:
    """What of other ranks' code differs from rank 0's, and a warning for each other config.

    Args:
        told: (digest of the lock, host) of each rank.
        sent: each lock with a resolved config, in the order in which `told` first has its digest.
    """
    first, first_config = sent[0]
    there = f"rank 0 ({told[0][1]})"
    problems: list[Problem] = []
    warnings: list[str] = []
    for digest, (other, config) in zip(dict.fromkeys(digest for digest, _ in told), sent, strict=True):
        ranks = [rank for rank, (one, _) in enumerate(told) if one == digest]
        hosts = ", ".join(dict.fromkeys(told[rank][1] for rank in ranks))
        # ``rank 1 (node-b)``, ``ranks 8, 9, 10 (node-b, node-c)``
        here = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({hosts})"
        for found in compare(first, other):
            # A library that one of them lacks is not needed, or was told before.
            is_other_library = found.severity is Severity.ENVIRONMENT and ABSENT not in (found.old, found.new)
            if found.severity is Severity.DRIFT or is_other_library:
                what = f"{here}: {found.what} is not that of {there}; install the same on every machine"
                problems.append(Problem(what, given=found.new, allowed=found.old))
        lines = [
            f"    {found.what}: {found.new}, not {found.old}"
            for found in config_differences(first_config, config)
            # Machines may keep their files in different places.
            if not (os.path.isabs(found.old) and os.path.isabs(found.new))
        ]
        if lines:
            warnings.append("\n".join([f"{here}: another config than that of {there}", *lines]))
    return problems, warnings
