"""Differences between two plugin locks or two resolved configs, and how grave they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from grpox.config import RunConfig
from grpox.errors.redaction import redacted
from grpox.plugins.requirements import canonical_name
from grpox.runfile.lock.model import Lock, LockedComponent, LockedDistribution

ABSENT = "-"
"""Shown in place of what one of the two has not."""
RESOLVED_CONFIG = "resolved config"
"""What differs where two locks have other hashes of the config, which does not say in which keys."""


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
    found = [*_distributions(old, new), *_components(old, new), *_environment(old, new)]
    if old.config != new.config:
        found.append(_of(Severity.CONFIG, RESOLVED_CONFIG, old.config[:12], new.config[:12]))
    return by_gravity(found)


def by_gravity(found: Iterable[Difference]) -> list[Difference]:
    """The gravest first, otherwise in the order given."""
    order = list(Severity)
    return sorted(found, key=lambda difference: order.index(difference.severity))


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The keys in which two resolved configs differ; ``output_dir`` is passed over, as in the lock's hash."""
    left, right = dict(_leaves(old)), dict(_leaves(new))
    return [
        _of(Severity.CONFIG, key, left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key, ABSENT) != right.get(key, ABSENT) and key != "output_dir"
    ]


def _of(severity: Severity, what: str, old: object, new: object) -> Difference:
    return Difference(severity, what, *(ABSENT if value in (None, "") else str(value) for value in (old, new)))


def _distributions(old: Lock, new: Lock) -> Iterator[Difference]:
    """Those of both. One that only one of them has is told by the component that comes from it."""
    others = {canonical_name(name): name for name in new.distributions}
    for name, before in old.distributions.items():
        other = others.get(canonical_name(name))
        if other is not None:
            yield from _distribution(name, before, new.distributions[other])


def _distribution(name: str, old: LockedDistribution, new: LockedDistribution) -> Iterator[Difference]:
    if old.version != new.version:
        yield _of(Severity.DRIFT, f"{name} version", old.version, new.version)
    if old.api != new.api:
        yield _of(Severity.DRIFT, f"{name} plugin API", old.api, new.api)
    if old.sha256 != new.sha256:
        # Of another version the sources are others anyway: its numbers would say it twice.
        if old.version == new.version:
            yield _of(Severity.DRIFT, f"{name} sources", _sources(old), _sources(new))
        return
    for label, before, after in (
        ("commit", _commit(old), _commit(new)),
        ("origin", old.origin, new.origin),
        ("editable", old.editable, new.editable),
    ):
        if before != after:
            yield _of(Severity.ORIGIN, f"{name} {label}", before, after)


def _sources(held: LockedDistribution) -> str:
    told = f"{held.sha256[:12]} ({held.files} files)"
    return f"{told} at {_commit(held)}" if held.commit else told


def _commit(held: LockedDistribution) -> str:
    return (held.commit or "")[:12] + (" with changes" if held.dirty else "")


def _components(old: Lock, new: Lock) -> Iterator[Difference]:
    for key in dict.fromkeys([*old.components, *new.components]):
        before, after = old.components.get(key), new.components.get(key)
        if before is None or after is None:
            unasked = any(held is not None and held.given == "unasked" for held in (before, after))
            severity = Severity.ENVIRONMENT if unasked else Severity.CONFIG
            yield _of(severity, key, _named(before), _named(after))
        elif (before.name, before.given) != (after.name, after.given):
            yield _of(Severity.CONFIG, key, _named(before), _named(after))
        else:
            yield from _component(key, before, after)


def _component(key: str, old: LockedComponent, new: LockedComponent) -> Iterator[Difference]:
    """Two components of one name: that their code or what it declares differs."""
    if canonical_name(old.distribution or "") != canonical_name(new.distribution or ""):
        yield _of(Severity.DRIFT, key, _named(old), _named(new))
        return
    if old.sha256 != new.sha256:
        yield _of(Severity.DRIFT, f"{key} file", _file(old), _file(new))
    elif old.target != new.target:
        severity = Severity.ORIGIN if old.given == "path" else Severity.DRIFT
        yield _of(severity, f"{key} target", old.target, new.target)
    for label in ("needs", "provides"):
        before, after = set(getattr(old, label)), set(getattr(new, label))
        if before != after:
            yield _of(Severity.DRIFT, f"{key} {label}", ", ".join(sorted(before)), ", ".join(sorted(after)))


def _named(held: LockedComponent | None) -> str:
    if held is None:
        return ABSENT
    return f"{held.name} ({held.distribution})" if held.distribution else f"{held.name} (by {held.given})"


def _file(held: LockedComponent) -> str:
    return f"{held.target} {(held.sha256 or '')[:12]}"


def _environment(old: Lock, new: Lock) -> Iterator[Difference]:
    if old.api != new.api:
        yield _of(Severity.ENVIRONMENT, "plugin API", old.api, new.api)
    both = old.distributions.keys() & new.distributions.keys()
    for name in dict.fromkeys([*old.versions, *new.versions]):
        before, after = old.versions.get(name), new.versions.get(name)
        if before != after and name not in both:
            yield _of(Severity.ENVIRONMENT, f"{name} version", before, after)


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


FREE = ("output_dir", "logging", "checkpoint", "tracking", "hub", "plugins", "watchdog")
"""Sections of the run file that change nothing of what is computed."""
FREE_KEYS = ("train.on_nonfinite", "train.max_skips_in_a_row", "evaluation.early_stop")
"""Keys that are changed for a run that stopped to go on."""


def changes(saved: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """The keys by which `config` is another run's than the resolved config `saved`."""
    return [
        found
        for found in config_differences(redacted(saved), redacted(config.model_dump(mode="json")))
        if found.what.partition(".")[0].partition("[")[0] not in FREE and not found.what.startswith(FREE_KEYS)
    ]
