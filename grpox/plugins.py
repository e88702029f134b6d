"""Discovery: every entry point of group `grpox` becomes a record, every component it names an offer.

pluggy's own loader keeps the first of two same-named entry points, lets one broken plugin abort the rest and
does not notice misspelt hooks. Here each plugin is loaded, checked and asked by itself, so that what is wrong
with one is a record of that one, with its provenance, and concerns nobody who did not select it.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Literal

import pluggy

from grpox import hookspecs
from grpox.errors import nearest
from grpox.hookspecs import API_VERSION, ENTRY_POINT_GROUP, KINDS, ComponentSpec
from grpox.requirements import canonical_name, none_met

DISABLE_VARIABLE = "GRPOX_DISABLE_PLUGINS"
"""Environment variable with the distributions, separated by commas, whose plugins are not loaded."""

PluginStatus = Literal["ok", "broken", "disabled"]
OfferStatus = Literal["ok", "incompatible", "unavailable"]


class InvalidPlugin(Exception):
    """A plugin breaks a rule of the plugin API; its author must mend it."""


@dataclass(frozen=True)
class PluginRecord:
    """One entry point: where it comes from, and whether it loaded."""

    entry_point: str
    module: str
    """The entry point's value: ``pkg.module`` or ``pkg.module:object``."""
    distribution: str
    version: str
    status: PluginStatus = "ok"
    reason: str = ""
    """Why it is not ok, in one line: for a broken plugin the exception's type and message."""
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"plugin '{self.entry_point}' of {self.distribution} {self.version}"


@dataclass(frozen=True)
class Offer:
    """One component that a loaded plugin offers, and whether it can be used here."""

    kind: str
    spec: ComponentSpec
    distribution: str
    version: str
    status: OfferStatus = "ok"
    reason: str = ""

    @property
    def qualified_name(self) -> str:
        """The spelling that selects this offer among several of one name."""
        return f"{self.distribution}:{self.spec.name}"


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("grpox")
    manager.add_hookspecs(hookspecs)
    return manager


@dataclass
class PluginSet:
    """All that discovery found. `manager` holds the plugins that loaded, for their lifecycle hooks."""

    records: list[PluginRecord] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    manager: pluggy.PluginManager = field(default_factory=_manager)
    warnings: list[str] = field(default_factory=list)
    """What to tell a user who asked for something that discovery could not do, a line each."""


def discover(disable: Iterable[str] = ()) -> PluginSet:
    """Load every installed plugin, in the order in which `sys.path` lists their distributions.

    Args:
        disable: distributions not to load, besides those of `GRPOX_DISABLE_PLUGINS`; their modules are not
            even imported. One that is not installed is a warning and no error: a run file may switch off what
        only some of the machines that it runs on have.

    Returns:
        One record for each entry point, and the offers of those that loaded. No plugin can make this raise.
    """
    named = os.environ.get(DISABLE_VARIABLE, "").split(",")
    given = {name.strip(): DISABLE_VARIABLE for name in named if name.strip()}
    given |= dict.fromkeys(disable, "the plugins.disable list")
    disabled = {canonical_name(name): by for name, by in given.items()}
    plugins = PluginSet()
    for entry_point, record in _entry_points():
        plugins.records.append(_admit(plugins, entry_point, record, disabled))
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
        distribution = entry_point.dist
        # A folder without METADATA has neither name nor version, whatever the type stubs say.
        name = (distribution.name if distribution else None) or "(unnamed distribution)"
        version = (distribution.version if distribution else None) or "(no version)"
        identity = (canonical_name(name), entry_point.value)
        if identity not in seen:
            seen.add(identity)
            yield entry_point, PluginRecord(entry_point.name, entry_point.value, name, version)


def _admit(
    plugins: PluginSet, entry_point: metadata.EntryPoint, record: PluginRecord, disabled: Mapping[str, str]
) -> PluginRecord:
    """Load one plugin into `plugins` and return its record; a plugin is taken whole or not at all."""
    by = disabled.get(canonical_name(record.distribution))
    if by is not None:
        return replace(record, status="disabled", reason=f"by {by}")
    try:
        plugin = entry_point.load()
        alone = _checked(plugin)
        offers = list(_offers(alone, record))
        # Two distributions may ship one module: both offer its components, its observers are called once.
        if not plugins.manager.is_registered(plugin):
            plugins.manager.register(plugin, name=f"{record.distribution}:{record.entry_point}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a plugin raises is its own affair
        return replace(record, status="broken", reason=described(error), error=error)
    plugins.offers.extend(offers)
    return record


def described(error: BaseException) -> str:
    """An exception in one line: its type, message and notes."""
    message = " ".join(str(error).split())
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return type(error).__name__ + (f": {message}" if message else "") + notes


def _checked(plugin: Any) -> pluggy.PluginManager:
    """A manager that holds this plugin alone, all of whose hooks exist and are marked as implementations."""
    manager = _manager()
    known = [name for name in vars(manager.hook) if name.startswith("grpox_")]
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        if not name.startswith("grpox_") or not inspect.isroutine(function):
            continue
        if manager.parse_hookimpl_opts(plugin, name) is None:
            advice = "mark it with @grpox.hookimpl" if name in known else _did_you_mean(name, known)
            raise InvalidPlugin(f"function {name} is not a hook implementation; {advice}")
    manager.register(plugin)
    for caller in manager.get_hookcallers(plugin) or ():
        required = any(not implementation.optionalhook for implementation in caller.get_hookimpls())
        if not caller.has_spec() and required:
            raise InvalidPlugin(f"there is no hook {caller.name}; {_did_you_mean(caller.name, known)}")
    return manager


def _did_you_mean(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"the hooks are {', '.join(known)}"


def _offers(alone: pluggy.PluginManager, record: PluginRecord) -> Iterator[Offer]:
    """Ask each discovery hook of one plugin by itself: pluggy's multicall would mix the answers of all."""
    for kind, hook in KINDS.items():
        taken = set()
        for implementation in getattr(alone.hook, hook).get_hookimpls():
            try:
                specs = list(implementation.function())
            except Exception as error:
                error.add_note(f"in {hook}")
                raise
            for spec in specs:
                _check(spec, hook)
                if spec.name in taken:
                    raise InvalidPlugin(f"{hook} offers '{spec.name}' twice")
                taken.add(spec.name)
                status, reason = _usable(spec)
                yield Offer(kind, spec, record.distribution, record.version, status, reason)


def _check(spec: object, hook: str) -> None:
    if not isinstance(spec, ComponentSpec):
        raise InvalidPlugin(f"{hook} offers a {type(spec).__name__}, not a ComponentSpec")
    if not re.fullmatch(r"[^\s:/]+", spec.name):
        raise InvalidPlugin(f"{hook} offers {spec.name!r}: a name has neither space, ':' nor '/'")
    for label, reference in (("target", spec.target), ("config", spec.config or "no:config")):
        if not re.fullmatch(r"[\w.]+:[\w.]+", reference):
            given = f"{hook}: the {label} of '{spec.name}' is {reference!r}"
            raise InvalidPlugin(f"{given}, not 'package.module:Name'")
    for label in ("needs", "provides", "requires"):
        names = getattr(spec, label)
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise InvalidPlugin(f"{hook}: {label} of '{spec.name}' is not a tuple of strings, ('a', 'b')")


def _usable(spec: ComponentSpec) -> tuple[OfferStatus, str]:
    if spec.api != API_VERSION:
        remedy = "upgrade grpox" if spec.api > API_VERSION else "upgrade the plugin"
        return "incompatible", f"written for plugin API {spec.api}, this grpox has {API_VERSION}: {remedy}"
    reasons = [reason for asked in spec.requires if (reason := none_met(asked, spec.install))]
    return ("unavailable", "; ".join(reasons)) if reasons else ("ok", "")
