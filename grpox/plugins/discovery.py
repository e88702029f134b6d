"""Discovery: every entry point of group `grpox` becomes a record, and each of its components an offer.

pluggy's loader keeps only the first of two entry points with one name, stops at the first broken plugin, and
does not notice misspelt hooks. Here each plugin is loaded and checked separately, so an error belongs to the
record of one plugin, with its origin, and affects only runs that select the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal

import pluggy

from grpox.errors import Problem, describe, nearest, redact
from grpox.plugins.hookspecs import API_VERSION, ENTRY_POINT_GROUP, KINDS, CommandSpec, ComponentSpec
from grpox.plugins.loader import COMMANDS, InvalidPlugin, check_hooks, new_manager, offered, watched
from grpox.plugins.requirements import canonical_name, unmet
from grpox.runtime.signals import raise_if_signal

__all__ = ["DISABLE_VARIABLE", "Offer", "OfferedCommand", "PluginRecord", "PluginSet", "discover"]

DISABLE_VARIABLE = "GRPOX_DISABLE_PLUGINS"
"""Environment variable with a comma-separated list of distributions whose plugins are not loaded."""

UNNAMED = ("(unnamed distribution)", "(no version)")

Status = Literal["ok", "broken", "disabled", "incompatible", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class _Contribution:
    """Something that a distribution brings, and its usability here."""

    distribution: str
    version: str
    status: Status = "ok"
    reason: str = ""
    """Reason in one line if the status is not ok; for a broken plugin, the exception's type and message."""
    remedy: str = ""
    """Ways to make it usable, a line each."""

    @property
    def origin(self) -> str:
        """Name and version of the distribution."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class PluginRecord(_Contribution):
    """One entry point: its origin and its load status."""

    entry_point: str
    module: str
    """Value of the entry point: ``pkg.module`` or ``pkg.module:object``."""
    error: BaseException | None = None
    """Exception of a broken plugin."""
    observes: tuple[str, ...] = ()
    """Lifecycle hooks that the module itself implements, called in every run."""

    def __str__(self) -> str:
        return f"plugin '{self.entry_point}' of {self.origin}"

    @property
    def suspicion(self) -> Problem:
        """Remark that a plugin that did not load might offer what is missing."""
        return Problem(f"{self} might offer it, but is {self.status}: {self.reason}")


@dataclass(frozen=True)
class Offer(_Contribution):
    """One component of a plugin."""

    kind: str
    spec: ComponentSpec
    module: str = ""
    """Module of the plugin, as in its record."""

    def __str__(self) -> str:
        return f"{self.kind} '{self.spec.name}' of {self.origin}"

    @property
    def qualified_name(self) -> str:
        """Name with distribution, which selects this component among several with one name."""
        return f"{self.distribution}:{self.spec.name}"


@dataclass(frozen=True)
class OfferedCommand(_Contribution):
    """One command of a plugin."""

    spec: CommandSpec


@dataclass
class PluginSet:
    """The installed plugins with their components and commands."""

    records: list[PluginRecord] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    manager: pluggy.PluginManager = field(default_factory=new_manager)
    """pluggy manager of the plugins that have lifecycle hooks."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about user requests that discovery could not fulfil, a line each."""
    commands: list[OfferedCommand] = field(default_factory=list)

    def add(self, entry_point: metadata.EntryPoint, record: PluginRecord) -> None:
        """Import a plugin, register its lifecycle hooks, and add its components and commands to the set.

        A broken plugin adds its error alone. No plugin can make this method raise; only a signal can.
        """
        try:
            with watched():
                plugin = entry_point.load()
                alone = check_hooks(plugin)
                commands = list(offered(alone, COMMANDS))
                components = [(kind, spec) for kind, hook in KINDS.items() for spec in offered(alone, hook)]
            hooks = {caller.name for caller in alone.get_hookcallers(plugin) or ()}
            observes = tuple(sorted(hooks - {*KINDS.values(), COMMANDS}))
            # If two distributions contain one module, both offer its components, but observers are called once.
            if observes and not self.manager.is_registered(plugin):
                self.manager.register(plugin, f"{record.distribution}:{record.entry_point}")
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything, which is recorded
            raise_if_signal(error)
            cure = f'python -c "import {record.module.partition(":")[0]}" shows the whole traceback'
            if isinstance(error, InvalidPlugin):
                cure = "docs/plugin-api.md has the hooks and rules"
            hide = f"{DISABLE_VARIABLE}={record.distribution} hides this message"
            remedy, reason = f"if the plugin is yours: {cure}\n{hide}", redact(describe(error))
            self.records.append(replace(record, status="broken", reason=reason, remedy=remedy, error=error))
            return
        origin: dict[str, Any] = {"distribution": record.distribution, "version": record.version}
        for kind, spec in components:
            usable = _usable(spec, record.distribution, spec.api)
            self.offers.append(Offer(kind, spec, record.module, **origin, **usable))
        self.commands += [OfferedCommand(spec, **origin, **_usable(spec)) for spec in commands]
        self.records.append(replace(record, observes=observes))

    def offers_called(self, name: str) -> list[Offer]:
        """Find the components that ``NAME``, ``kind/NAME``, ``dist:NAME`` or ``kind/dist:NAME`` stands for."""
        kind, _, rest = name.rpartition("/")
        distribution, _, bare = rest.rpartition(":")
        return [
            offer
            for offer in self.offers
            if offer.spec.name == bare
            and kind in ("", offer.kind)
            and canonical_name(distribution) in ("", canonical_name(offer.distribution))
        ]

    def suspects(self, distribution: str = "") -> list[PluginRecord]:
        """List the plugins that did not load, and so might offer a missing component."""
        return [
            record
            for record in self.records
            if record.status != "ok"
            and canonical_name(distribution) in ("", canonical_name(record.distribution))
        ]


def _usable(
    spec: ComponentSpec | CommandSpec, distribution: str = "", api: int = API_VERSION
) -> dict[str, Any]:
    """Return status, reason and remedy of a component or command here; empty if it is usable."""
    if api != API_VERSION:
        has = f"written for plugin API {api}, but this grpox has {API_VERSION}"
        reason = f"{has}: upgrade {'grpox' if api > API_VERSION else 'the plugin'}"
        remedy = f"pip install --upgrade {'grpox' if api > API_VERSION else distribution}"
        return {"status": "incompatible", "reason": reason, "remedy": remedy}
    reason, remedy = unmet(*spec.requires, install=spec.install)
    return {"status": "unavailable", "reason": reason, "remedy": remedy} if reason else {}


def discover(disable: Iterable[str] = ()) -> PluginSet:
    """Find every installed plugin, in the order in which `sys.path` lists their distributions.

    Each plugin's module is imported, so it must import nothing heavy.

    Args:
        disable: distributions not to load, in addition to `GRPOX_DISABLE_PLUGINS`; their modules are not
            imported. If one is not installed, that is a warning and not an error, because a run file may
            disable a plugin that only some machines have.

    Returns:
        one record for each entry point, and the components of plugins that are not broken. No plugin can make
        this function raise.
    """
    named = os.environ.get(DISABLE_VARIABLE, "").split(",")
    given = {name.strip(): DISABLE_VARIABLE for name in named if name.strip()}
    given |= dict.fromkeys(disable, "the plugins.disable list")
    disabled = {canonical_name(name): by for name, by in given.items()}
    plugins, seen = PluginSet(), set()
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        # A folder without METADATA has neither name nor version.
        name, version = _name_and_version(entry_point.dist) if entry_point.dist else UNNAMED
        # `importlib.metadata` skips a distribution whose folder name came earlier on `sys.path`, and does not
        # notice that ``~rpox-0.1.dist-info``, left by an interrupted pip, is also grpox.
        identity = (canonical_name(name), entry_point.value)
        if identity in seen:
            continue
        seen.add(identity)
        record = PluginRecord(entry_point.name, entry_point.value, distribution=name, version=version)
        if (by := disabled.get(canonical_name(name))) is None:
            plugins.add(entry_point, record)
        else:
            remedy = f"remove {name} from {by}"
            plugins.records.append(replace(record, status="disabled", reason=f"by {by}", remedy=remedy))
    known = sorted({canonical_name(record.distribution) for record in plugins.records})
    for name, by in given.items():
        if canonical_name(name) not in known:
            near = nearest(canonical_name(name), known)
            what = f"{by} names {name!r}, but no installed distribution of that name has a plugin"
            plugins.warnings.append(what + (f"; did you mean {near}?" if near else ""))
    return plugins


@lru_cache(maxsize=1024)
def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Read METADATA once: the properties of `importlib.metadata` parse the whole file each time."""
    headers = distribution.metadata
    name, version = (str(headers[key] or "") if key in headers else "" for key in ("Name", "Version"))
    return name or UNNAMED[0], version or UNNAMED[1]
