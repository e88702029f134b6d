"""Discovery: every entry point of group `grpox` becomes a record, every component it names an offer.

pluggy's own loader keeps the first of two same-named entry points, lets one broken plugin abort the rest and
does not notice misspelt hooks. Here each plugin is loaded, checked and asked by itself, so that what is wrong
with one is a record of that one, with its provenance, and concerns nobody who did not select it.

What a plugin answered is remembered (`grpox.plugins.cache`): it is imported only when it is new, changed or
selected, or observes the run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Literal

import pluggy

from grpox.errors import describe, nearest
from grpox.plugins.cache import PluginCache
from grpox.plugins.deprecation import api_note, api_problem
from grpox.plugins.fingerprint import facts
from grpox.plugins.hookspecs import ENTRY_POINT_GROUP, ComponentSpec
from grpox.plugins.loader import Answer, Loaded, load, new_manager
from grpox.plugins.requirements import canonical_name, none_met

__all__ = ["DISABLE_VARIABLE", "Offer", "PluginRecord", "PluginSet", "discover"]

DISABLE_VARIABLE = "GRPOX_DISABLE_PLUGINS"
"""Environment variable with the distributions, separated by commas, whose plugins are not loaded."""

PluginStatus = Literal["ok", "broken", "disabled"]
OfferStatus = Literal["ok", "incompatible", "unavailable"]


@dataclass(frozen=True)
class PluginRecord:
    """One entry point: where it comes from, and whether it loads."""

    entry_point: str
    module: str
    """The entry point's value: ``pkg.module`` or ``pkg.module:object``."""
    distribution: str
    version: str
    status: PluginStatus = "ok"
    reason: str = ""
    """Why it is not ok, in one line: for a broken plugin the exception's type and message. Of one that is ok,
    what it uses that is deprecated."""
    error: BaseException | None = None
    """Of a broken plugin, once it was loaded in this process: see `PluginSet.load`."""
    observes: tuple[str, ...] = ()
    """Lifecycle hooks that the module implements itself, for every run."""

    def __str__(self) -> str:
        return f"plugin '{self.entry_point}' of {self.distribution} {self.version}"


@dataclass(frozen=True)
class Offer:
    """One component that a plugin offers, and whether it can be used here."""

    kind: str
    spec: ComponentSpec
    distribution: str
    version: str
    status: OfferStatus = "ok"
    reason: str = ""
    """Why it cannot be used; of one that can, what its author should change."""
    module: str = ""
    """Of the plugin that offers it, as in its record."""

    @property
    def qualified_name(self) -> str:
        """The spelling that selects this offer among several of one name."""
        return f"{self.distribution}:{self.spec.name}"


@dataclass
class PluginSet:
    """All that discovery found, and the means to load what was not loaded for it."""

    records: list[PluginRecord] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    loaded: pluggy.PluginManager = field(default_factory=new_manager)
    """Holds the plugins with lifecycle hooks, of those that were loaded so far."""
    warnings: list[str] = field(default_factory=list)
    """What to tell a user who asked for something that discovery could not do, a line each."""
    remembered: dict[tuple[str, str], metadata.EntryPoint] = field(default_factory=dict)
    """(distribution, module) -> plugin that was not loaded, because the cache knew its answer."""
    cache: PluginCache | None = None

    @property
    def manager(self) -> pluggy.PluginManager:
        """Holds every plugin with lifecycle hooks, for a run; those not yet loaded are loaded now."""
        self.load(record for record in self.records if record.observes)
        return self.loaded

    def load(self, records: Iterable[PluginRecord]) -> bool:
        """Load those of `records` of which only the cache has spoken, so that they speak for themselves.

        The set's records and offers then say what the plugins say now, with the original error of one that
        is broken.

        Returns:
            Whether any was loaded: what was found in the set before may have changed.
        """
        asked = False
        for record in list(records):
            entry_point = self.remembered.pop((record.distribution, record.module), None)
            if entry_point is not None:
                asked = True
                self.offers = [offer for offer in self.offers if not _is_of(offer, record)]
                plain = PluginRecord(*_origin(record))
                self.records[self.records.index(record)] = self._load(entry_point, plain)
        if asked and self.cache is not None:
            self.cache.save()
        return asked

    def load_selected(self, offers: Iterable[Offer], distribution: str = "") -> bool:
        """Load the plugins of `offers`; where there are none, the broken ones, which may hold what was meant.

        Args:
            offers: those of a name that somebody selects.
            distribution: the only one that is meant; empty for any.

        Returns:
            Whether `offers` may have changed.
        """
        modules = {(offer.distribution, offer.module) for offer in offers}
        if modules:
            return self.load(r for r in self.records if (r.distribution, r.module) in modules)
        name = canonical_name(distribution)
        return self.load(
            record
            for record in self.records
            if record.status == "broken" and name in ("", canonical_name(record.distribution))
        )

    def _add(self, entry_point: metadata.EntryPoint, record: PluginRecord) -> None:
        """Take a plugin into the set: what the cache says of it, or what it says itself."""
        answer = self.cache.get(entry_point) if self.cache else None
        if answer is None:
            self.records.append(self._load(entry_point, record))
        else:
            self.remembered[record.distribution, record.module] = entry_point
            self.records.append(self._take(record, answer))

    def _load(self, entry_point: metadata.EntryPoint, record: PluginRecord) -> PluginRecord:
        found = load(entry_point)
        if found.answer.observes:
            found = self._registered(found, f"{record.distribution}:{record.entry_point}")
        if self.cache is not None:
            self.cache.put(entry_point, found.answer)
        return replace(self._take(record, found.answer), error=found.error)

    def _registered(self, found: Loaded, name: str) -> Loaded:
        try:
            # Two distributions may ship one module: both offer its components, its observers are called once.
            if not self.loaded.is_registered(found.plugin):
                self.loaded.register(found.plugin, name)
        except Exception as error:  # noqa: BLE001 - one distribution may use a name twice, for two modules
            return Loaded(Answer(failure=describe(error)), error=error)
        return found

    def _take(self, record: PluginRecord, answer: Answer) -> PluginRecord:
        if answer.failure:
            return replace(record, status="broken", reason=answer.failure)
        for kind, spec in answer.components:
            status, reason = self._usable(spec)
            offer = Offer(kind, spec, record.distribution, record.version, status, reason, record.module)
            self.offers.append(offer)
        return replace(record, observes=answer.observes, reason="; ".join(answer.notes))

    def _usable(self, spec: ComponentSpec) -> tuple[OfferStatus, str]:
        if problem := api_problem(spec.api):
            return "incompatible", problem
        lack = self.cache.lack if self.cache else none_met
        reasons = [reason for asked in spec.requires if (reason := lack(asked, spec.install))]
        return ("unavailable", "; ".join(reasons)) if reasons else ("ok", api_note(spec.api))


def discover(disable: Iterable[str] = (), fresh: bool = False) -> PluginSet:
    """Find every installed plugin, in the order in which `sys.path` lists their distributions.

    A plugin that is new or has changed is imported and asked; of the others the last answer is known.

    Args:
        disable: distributions not to load, besides those of `GRPOX_DISABLE_PLUGINS`; their modules are not
            even imported. One that is not installed is a warning and no error: a run file may switch off what
            only some of the machines that it runs on have.
        fresh: ask every plugin, whatever is known.

    Returns:
        One record for each entry point, and the offers of those that are not broken. No plugin can make this
        raise.
    """
    named = os.environ.get(DISABLE_VARIABLE, "").split(",")
    given = {name.strip(): DISABLE_VARIABLE for name in named if name.strip()}
    given |= dict.fromkeys(disable, "the plugins.disable list")
    disabled = {canonical_name(name): by for name, by in given.items()}
    cache = PluginCache(fresh)
    plugins = PluginSet(cache=cache)
    for entry_point, record in _entry_points():
        by = disabled.get(canonical_name(record.distribution))
        if by is None:
            plugins._add(entry_point, record)
        else:
            plugins.records.append(replace(record, status="disabled", reason=f"by {by}"))
    cache.save()
    plugins.warnings += _not_found(given, {record.distribution for record in plugins.records})
    return plugins


def _not_found(disabled: Mapping[str, str], installed: Collection[str]) -> Iterator[str]:
    """A line for each distribution that was to be disabled and has no plugin here."""
    known = {canonical_name(name) for name in installed}
    for name, by in disabled.items():
        if canonical_name(name) not in known:
            near = nearest(canonical_name(name), sorted(known))
            hint = f"; did you mean {near}?" if near else ""
            yield f"{by} names {name!r}, and no installed distribution of that name has a plugin{hint}"


def _entry_points() -> Iterator[tuple[metadata.EntryPoint, PluginRecord]]:
    """Every entry point of the group, with a record that says where it comes from.

    `importlib.metadata` passes over a distribution whose folder name it has met earlier on `sys.path`. It
    does not see that ``~rpox-0.1.dist-info``, left by an interrupted pip, is grpox again: hence `seen`.
    """
    seen = set()
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        # A folder without METADATA has neither name nor version.
        found = facts(entry_point.dist) if entry_point.dist else None
        name = (found.name if found else "") or "(unnamed distribution)"
        version = (found.version if found else "") or "(no version)"
        identity = (canonical_name(name), entry_point.value)
        if identity not in seen:
            seen.add(identity)
            yield entry_point, PluginRecord(entry_point.name, entry_point.value, name, version)


def _origin(record: PluginRecord) -> tuple[str, str, str, str]:
    return record.entry_point, record.module, record.distribution, record.version


def _is_of(offer: Offer, record: PluginRecord) -> bool:
    return (offer.distribution, offer.module) == (record.distribution, record.module)
