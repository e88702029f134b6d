"""Differences between plugin locks or resolved configs, of two runs or of the ranks of one run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.config import RunConfig
from grpox.config.inputs import AUTO
from grpox.errors import ConfigError, Problem
from grpox.errors.redaction import redacted
from grpox.plugins.requirements import canonical_name
from grpox.runfile.lock.model import Lock, LockedComponent, read_lock
from grpox.runfile.yaml_lines import leaves, read_yaml
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from grpox.runtime.world import World

ABSENT = "-"
"""Shown for an entry that one of the two lacks."""
RESOLVED_CONFIG = "resolved config"
"""Name of a difference in the config's hash, which does not show the keys."""
FREE = ("output_dir", "logging", "record", "alarms", "checkpoint", "tracking", "hub", "plugins", "watchdog")
"""Sections of the run file that do not change the computation."""
DTYPE, LONGEST, CHAT_DATE = "model.dtype", "model.longest_sequence", "model.chat_date"
MICRO_BATCH = "train.max_tokens_per_micro_batch"
AUTOMATIC = DTYPE, LONGEST, MICRO_BATCH, CHAT_DATE
"""Keys whose value ``auto`` a run replaces by a value for its device, or by its date."""
FREE_KEYS = ("train.on_nonfinite", "train.max_skips_in_a_row", "evaluation.early_stop")
"""Keys that users change so that a stopped run can continue."""


class Severity(Enum):
    """Severity of a difference, the most severe first."""

    DRIFT = "drift"
    """A component of the same name has different code: results may differ with equal configs."""
    ENVIRONMENT = "environment"
    """A different version of Python or a library, or a different plugin that observes every run."""
    CONFIG = "config"
    """A different run file."""
    ORIGIN = "origin"
    """The same code from another commit, another kind of install or another folder."""


@dataclass(frozen=True)
class Difference:
    """One difference between an old and a new lock or config."""

    severity: Severity
    what: str
    """Distribution, component or library, and its property: ``grpox-foo version``."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.what}: {self.old} -> {self.new}"


def compare(old: Lock, new: Lock) -> list[Difference]:
    """List the differences of two locks, the most severe first; locks with equal digests have none."""
    changed = [*_distributions(old, new), *_components(old, new)]
    changed += _changed(Severity.ENVIRONMENT, "plugin API", old.api, new.api)
    both = old.distributions.keys() & new.distributions.keys()
    for name in dict.fromkeys([*old.versions, *new.versions]):
        if name not in both:
            before, after = old.versions.get(name), new.versions.get(name)
            changed += _changed(Severity.ENVIRONMENT, f"{name} version", before, after)
    changed += _changed(Severity.CONFIG, RESOLVED_CONFIG, old.config[:12], new.config[:12])
    return _by_gravity(changed)


def run_differences(old: Path, new: Path) -> list[Difference]:
    """List the differences of two run folders or lock files, the most severe first."""
    changed = compare(read_lock(old), read_lock(new))
    files = [file for folder in (old, new) if (file := folder / "config.yaml").is_file()]
    configs = [read_yaml(file.read_text(encoding="utf-8"), str(file)).data or {} for file in files]
    if len(configs) == 2 and (keys := config_differences(*configs)):
        # The differing keys are more informative than the hash.
        changed = _by_gravity([*(each for each in changed if each.what != RESOLVED_CONFIG), *keys])
    return changed


def _by_gravity(unsorted: Iterable[Difference]) -> list[Difference]:
    order = list(Severity)
    return sorted(unsorted, key=lambda difference: order.index(difference.severity))


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """List the differing keys of two resolved configs, without ``output_dir``, as in the lock's hash."""
    left, right = dict(leaves(old)), dict(leaves(new))
    return [
        difference
        for key in dict.fromkeys([*left, *right])
        if key != "output_dir"
        for difference in _changed(Severity.CONFIG, key, left.get(key, ABSENT), right.get(key, ABSENT))
    ]


def changes(saved: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """List the differences from the resolved config `saved` that make `config` a different run.

    With ``auto`` for a key of `AUTOMATIC` it is the same run with the value that was recorded.
    """
    return [
        each
        for each in config_differences(redacted(saved), redacted(config.model_dump(mode="json")))
        if not (each.what in AUTOMATIC and each.new == AUTO)
        and not (each.what == CHAT_DATE and each.old in (AUTO, ABSENT))  # of a run from before there was a date
        and each.what.partition(".")[0].partition("[")[0] not in FREE
        and not each.what.startswith(FREE_KEYS)
    ]


def _changed(severity: Severity, what: str, old: object, new: object) -> Iterator[Difference]:
    """Yield one difference if `old` and `new` are not equal."""
    if old != new:
        shown = (ABSENT if value in (None, "") else str(value) for value in (old, new))
        yield Difference(severity, what, *shown)


def _distributions(old: Lock, new: Lock) -> Iterator[Difference]:
    """Compare the distributions of both locks; one that a lock lacks shows in its components."""
    others = {canonical_name(name): after for name, after in new.distributions.items()}
    for name, before in old.distributions.items():
        if (after := others.get(canonical_name(name))) is None:
            continue
        yield from _changed(Severity.DRIFT, f"{name} version", before.version, after.version)
        yield from _changed(Severity.DRIFT, f"{name} plugin API", before.api, after.api)
        commits = [(each.commit or "")[:12] + " with changes" * bool(each.dirty) for each in (before, after)]
        if before.sha256 == after.sha256:
            yield from _changed(Severity.ORIGIN, f"{name} commit", *commits)
            yield from _changed(Severity.ORIGIN, f"{name} origin", before.origin, after.origin)
            yield from _changed(Severity.ORIGIN, f"{name} editable", before.editable, after.editable)
        elif before.version == after.version:
            # A different version always has different sources.
            sources = (
                f"{each.sha256[:12]} ({each.files} files)" + (f" at {commit}" if each.commit else "")
                for each, commit in zip((before, after), commits, strict=True)
            )
            yield from _changed(Severity.DRIFT, f"{name} sources", *sources)


def _components(old: Lock, new: Lock) -> Iterator[Difference]:
    for key in dict.fromkeys([*old.components, *new.components]):
        before, after = old.components.get(key), new.components.get(key)
        if not (before and after and (before.name, before.given) == (after.name, after.given)):
            unasked = {each.given for each in (before, after) if each} == {"unasked"}
            severity = Severity.ENVIRONMENT if unasked else Severity.CONFIG
            yield from _changed(severity, key, _named(before), _named(after))
            continue
        pair = (before, after)
        if canonical_name(before.distribution or "") != canonical_name(after.distribution or ""):
            yield from _changed(Severity.DRIFT, key, *map(_named, pair))
            continue
        if before.sha256 != after.sha256:
            files = (f"{each.target} {(each.sha256 or '')[:12]}" for each in pair)
            yield from _changed(Severity.DRIFT, f"{key} file", *files)
        else:
            severity = Severity.ORIGIN if before.given == "path" else Severity.DRIFT
            yield from _changed(severity, f"{key} target", before.target, after.target)
        for label in ("needs", "provides"):
            names = (", ".join(sorted(set(getattr(each, label)))) for each in pair)
            yield from _changed(Severity.DRIFT, f"{key} {label}", *names)


def _named(locked: LockedComponent | None) -> str:
    return ABSENT if locked is None else f"{locked.name} ({locked.distribution or f'by {locked.given}'})"


def check_ranks(world: World, lock: Lock, config: Mapping[str, Any]) -> None:
    """Refuse a run whose ranks have different code; a collective of all ranks.

    A different config only causes a warning on rank 0, because an override may suit a machine. Plugins that
    observe every run are ignored, because observers are called only on rank 0.

    Args:
        lock: this rank's lock.
        config: this rank's resolved config.

    Raises:
        ConfigError: on all ranks, with one problem for each difference from rank 0.
    """
    lock = lock.selected()
    digests = world.gather([lock.digest])
    if len(set(digests)) == 1:
        return
    # As text, because another version of grpox may have other classes.
    texts = world.gather([json.dumps([socket.gethostname(), lock.text(), config], default=str)])
    hosts, locks, configs = zip(*map(json.loads, texts), strict=True)
    first, problems = Lock.model_validate_json(locks[0]), list[Problem]()
    for digest in dict.fromkeys(digests):
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        machines = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        # ``rank 1 (node-b)``, ``ranks 8, 9, 10 (node-b, node-c)``
        here = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({machines})"
        cure = f"differs from rank 0 ({hosts[0]}); install the same code on every machine"
        problems += [
            Problem(f"{here}: {each.what} {cure}", given=each.new, allowed=each.old)
            for each in compare(first, Lock.model_validate_json(locks[ranks[0]]))
            # A library that a rank lacks is not needed; otherwise its absence was an error before.
            if each.severity is Severity.DRIFT
            or (each.severity is Severity.ENVIRONMENT and ABSENT not in (each.old, each.new))
        ]
        lines = [
            f"    {each.what}: {each.new}, not {each.old}"
            for each in config_differences(configs[0], configs[ranks[0]])
            # Machines may store their files in different folders.
            if not (os.path.isabs(each.old) and os.path.isabs(each.new))
        ]
        if lines and world.is_main:
            lines = [f"{here}: the config differs from rank 0 ({hosts[0]})", *lines]
            get_logger(__name__).warning("%s", "\n".join(lines))
    if problems:
        raise ConfigError(problems)
