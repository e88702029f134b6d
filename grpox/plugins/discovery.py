"""Discovery: every entry point of group `grpox` becomes a record, every component it names an offer.

pluggy's own loader keeps the first of two same-named entry points, lets one broken plugin abort the rest and
does not notice misspelt hooks. Here each plugin is loaded, checked and asked by itself, so that what is wrong
with one is a record of that one, with its provenance, and concerns nobody who did not select it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from typing import Literal

import pluggy

from grpox.errors import describe, nearest
from grpox.plugins.hookspecs import API_VERSIONS, ENTRY_POINT_GROUP, OLDEST_API, CommandSpec, ComponentSpec
from grpox.plugins.loader import load, new_manager
from grpox.plugins.requirements import canonical_name, unmet

__all__ = ["DISABLE_VARIABLE", "Offer", "OfferedCommand", "PluginRecord", "PluginSet", "discover"]

DISABLE_VARIABLE = "GRPOX_DISABLE_PLUGINS"
"""Environment variable with the distributions, separated by commas, whose plugins are not loaded."""

UNNAMED = ("(unnamed distribution)", "(no version)")

PluginStatus = Literal["ok", "broken", "disabled"]
OfferStatus = Literal["ok", "incompatible", "unavailable"]


class _Brought:
    """Something that a distribution brings."""

    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Name and version of the distribution."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class PluginRecord(_Brought):
    """One entry point: its origin, and whether it loads."""

    entry_point: str
    module: str
    """The entry point's value: ``pkg.module`` or ``pkg.module:object``."""
    distribution: str
    version: str
    status: PluginStatus = "ok"
    reason: str = ""
    """Reason why it is not ok, in one line: for a broken plugin the exception's type and message."""
    error: BaseException | None = None
    """The error of a broken plugin."""
    observes: tuple[str, ...] = ()
    """Lifecycle hooks that the module implements itself, for every run."""

    def __str__(self) -> str:
        return f"plugin '{self.entry_point}' of {self.origin}"


@dataclass(frozen=True)
class Offer(_Brought):
    """One component that a plugin offers, and whether it can be used here."""

    kind: str
    spec: ComponentSpec
    distribution: str
    version: str
    status: OfferStatus = "ok"
    reason: str = ""
    """Reason why it cannot be used."""
    module: str = ""
    """Module of the plugin that offers it, as in its record."""

    def __str__(self) -> str:
        return f"{self.kind} '{self.spec.name}' of {self.origin}"

    @property
    def qualified_name(self) -> str:
        """The spelling that selects this offer among several of one name."""
        return f"{self.distribution}:{self.spec.name}"


@dataclass(frozen=True)
class OfferedCommand(_Brought):
    """One command that a plugin brings."""

    spec: CommandSpec
    distribution: str
    version: str

    @property
    def lacks(self) -> str:
        """Requirements that are not met here; empty if all are."""
        return _lacking(self.spec)


@dataclass
class PluginSet:
    """The installed plugins and all that they offer."""

    records: list[PluginRecord] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    manager: pluggy.PluginManager = field(default_factory=new_manager)
    """Calls the plugins that have lifecycle hooks."""
    warnings: list[str] = field(default_factory=list)
    """Messages about user requests that discovery could not fulfil, a line each."""
    commands: list[OfferedCommand] = field(default_factory=list)

    def add(self, entry_point: metadata.EntryPoint, record: PluginRecord) -> None:
        """Import a plugin, register its lifecycle hooks, and add its components and commands to the set."""
        loaded = load(entry_point)
        error = loaded.error
        # Two distributions may ship one module: both offer its components, its observers are called once.
        if error is None and loaded.observes and not self.manager.is_registered(loaded.plugin):
            try:
                self.manager.register(loaded.plugin, f"{record.distribution}:{record.entry_point}")
            except Exception as refused:  # noqa: BLE001 - one distribution may use a name twice, for two modules
                error = refused
        if error is not None:
            self.records.append(replace(record, status="broken", reason=describe(error), error=error))
            return
        origin = (record.distribution, record.version)
        self.offers += [
            Offer(kind, spec, *origin, *_usable(kind, spec), record.module) for kind, spec in loaded.components
        ]
        self.commands += [OfferedCommand(spec, *origin) for spec in loaded.commands]
        self.records.append(replace(record, observes=loaded.observes))

    def offers_called(self, name: str, kind: str = "", distribution: str = "") -> list[Offer]:
        """The offers of this name, of one kind and of one distribution where these are given."""
        return [
            offer
            for offer in self.offers
            if offer.spec.name == name
            and kind in ("", offer.kind)
            and canonical_name(distribution) in ("", canonical_name(offer.distribution))
        ]

    def suspicions(self, distribution: str = "") -> dict[str, PluginRecord]:
        """Message -> plugin, for each plugin that did not load and may offer the missing component."""
        return {
            f"{record} may offer it, but it is {record.status}: {record.reason}": record
            for record in self.records
            if record.status != "ok"
            and canonical_name(distribution) in ("", canonical_name(record.distribution))
        }


def _usable(kind: str, spec: ComponentSpec) -> tuple[OfferStatus, str]:
    """Return whether a component can be used here, and why not."""
    oldest, newest = OLDEST_API[kind], API_VERSIONS[kind]
    if not oldest <= spec.api <= newest:
        has = f"has {newest}" + (f" and takes {oldest} and later" if oldest < newest else "")
        remedy = "upgrade grpox" if spec.api > newest else "upgrade the plugin"
        return "incompatible", f"written for {kind} API {spec.api}, this grpox {has}: {remedy}"
    lacks = _lacking(spec)
    return ("unavailable", lacks) if lacks else ("ok", "")


def _lacking(spec: ComponentSpec | CommandSpec) -> str:
    return "; ".join(reason for requirement in spec.requires if (reason := unmet(requirement, spec.install)))


def discover(disable: Iterable[str] = ()) -> PluginSet:
    """Find every installed plugin, in the order in which `sys.path` lists their distributions.

    Each plugin's module is imported, which is why it must import nothing heavy.

    Args:
        disable: distributions not to load, besides those of `GRPOX_DISABLE_PLUGINS`; their modules are not
            even imported. One that is not installed is a warning and no error: a run file may switch off what
            only some of the machines that it runs on have.

    Returns:
        One record for each entry point, and the offers of those that are not broken. No plugin can make this
        raise.
    """
    named = os.environ.get(DISABLE_VARIABLE, "").split(",")
    given = {name.strip(): DISABLE_VARIABLE for name in named if name.strip()}
    given |= dict.fromkeys(disable, "the plugins.disable list")
    disabled = {canonical_name(name): by for name, by in given.items()}
    plugins = PluginSet()
    for entry_point, record in _entry_points():
        by = disabled.get(canonical_name(record.distribution))
        if by is None:
            plugins.add(entry_point, record)
        else:
            plugins.records.append(replace(record, status="disabled", reason=f"by {by}"))
    known = sorted({canonical_name(record.distribution) for record in plugins.records})
    for name, by in given.items():
        if canonical_name(name) not in known:
            near = nearest(canonical_name(name), known)
            what = f"{by} names {name!r}, and no installed distribution of that name has a plugin"
            plugins.warnings.append(what + (f"; did you mean {near}?" if near else ""))
    return plugins


def _entry_points() -> Iterator[tuple[metadata.EntryPoint, PluginRecord]]:
    """Yield every entry point of the group, with a record of its origin.

    `importlib.metadata` passes over a distribution whose folder name it has met earlier on `sys.path`. It
    does not see that ``~rpox-0.1.dist-info``, left by an interrupted pip, is grpox again: hence `seen`.
    """
    seen = set()
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        # A folder without METADATA has neither name nor version.
        name, version = _name_and_version(entry_point.dist) if entry_point.dist else UNNAMED
        identity = (canonical_name(name), entry_point.value)
        if identity not in seen:
            seen.add(identity)
            yield entry_point, PluginRecord(entry_point.name, entry_point.value, name, version)


@lru_cache(maxsize=1024)
def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Read METADATA once: the properties of `importlib.metadata` parse the whole file each time."""
    headers = distribution.metadata
    name, version = (str(headers[key] or "") if key in headers else "" for key in ("Name", "Version"))
    return name or UNNAMED[0], version or UNNAMED[1]
