"""Tables of ``grpox plugins list``, ``show`` and ``diff``."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.cli.app import conflict
from grpox.errors import ConfigError, Problem, nearest
from grpox.errors.console import folding_table
from grpox.errors.validation import allowed_values, fields_by_key, written
from grpox.plugins.discovery import DISABLE_VARIABLE, Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.hookspecs import API_VERSION, KINDS, CommandSpec, ComponentSpec
from grpox.plugins.loader import InvalidPlugin
from grpox.plugins.requirements import lack

if TYPE_CHECKING:
    from grpox.runfile.lock.differences import Difference

ROW_KINDS = (*KINDS, "command", "plugin")
"""Kinds of rows: of components, of commands, and of plugins that did not load or that observe every run."""
STYLES = {"ok": "green", "disabled": "dim", "unavailable": "yellow", "conflict": "red"}


@dataclass(frozen=True)
class Row:
    """One line of the list; `status` comes from the component or plugin; ``conflict``: a name offered twice."""

    kind: str
    name: str
    distribution: str
    version: str
    status: str
    reason: str
    """Reason why the row is not ok."""
    summary: str
    remedy: str = ""
    place: str = ""
    """Line on which a plugin broke."""

    @property
    def why(self) -> str:
        """Reason with the place."""
        return f"{self.reason}\n{self.place}".strip()

    def as_dict(self, why: bool) -> dict[str, str]:
        """Return the texts of the row by name, the explanation only with `why`."""
        explanation = {"why": self.why, "remedy": self.remedy} if why else {}
        texts = {name: text for name, text in vars(self).items() if name not in ("remedy", "place")}
        return texts | explanation


def rows(plugins: PluginSet, kind: str | None = None) -> list[Row]:
    """List all components by kind and name, then commands, then plugins that have their own row.

    Args:
        plugins: the discovered plugins.
        kind: kind of rows to list; None lists all.

    Raises:
        ConfigError: the kind does not exist.
    """
    if kind is not None and kind not in ROW_KINDS:
        near, allowed = nearest(kind, ROW_KINDS), ", ".join(ROW_KINDS)
        raise ConfigError("no such kind", "--kind", given=kind, allowed=allowed, nearest=near)
    components = sorted(
        (_component_row(offer, plugins) for offer in plugins.offers),
        key=lambda row: (ROW_KINDS.index(row.kind), row.name, row.distribution),
    )
    commands = sorted((_command_row(each, plugins) for each in plugins.commands), key=lambda row: row.name)
    others = [_plugin_row(each) for each in plugins.records if each.status != "ok" or each.observes]
    return [row for row in (*components, *commands, *others) if kind in (None, row.kind)]


def _component_row(offer: Offer, plugins: PluginSet) -> Row:
    status, reason, spec, remedy = str(offer.status), offer.reason, offer.spec, ""
    if status == "incompatible":
        remedy = f"pip install --upgrade {'grpox' if spec.api > API_VERSION else offer.distribution}"
    elif status == "unavailable":
        remedy = _requirements_remedy(spec)
    same = plugins.offers_called(spec.name, offer.kind)
    if len(same) > 1:
        status, use = "conflict", f"write {offer.qualified_name}"
        what = f"{' and '.join(each.origin for each in same)} offer this name: {use}"
        others = sorted({each.distribution for each in same} - {offer.distribution})
        # grpox cannot run without its own plugins.
        off = f"{DISABLE_VARIABLE}={','.join(others)}"
        switch = "" if not others or "grpox" in others else f"; or switch off the other: {off}"
        reason = "; ".join(filter(None, (what, reason)))
        remedy = "\n".join(filter(None, (f"{use} in the run file{switch}", remedy)))
    origin = (offer.distribution, offer.version)
    return Row(offer.kind, spec.name, *origin, status, reason, spec.summary, remedy)


def _requirements_remedy(spec: ComponentSpec | CommandSpec) -> str:
    lacks = filter(any, (lack(requirement, spec.install) for requirement in spec.requires))
    return "\n".join(dict.fromkeys(remedy or "its author has to correct that" for _, remedy in lacks))


def _command_row(it: OfferedCommand, plugins: PluginSet) -> Row:
    origin = (it.distribution, it.version)
    if clash := conflict(it, plugins.commands):
        texts = ("conflict", clash.what, it.spec.help, clash.allowed)
    else:
        texts = ("unavailable" if it.lacks else "ok", it.lacks, it.spec.help, _requirements_remedy(it.spec))
    return Row("command", it.spec.name, *origin, *texts)


def _plugin_row(it: PluginRecord) -> Row:
    summary = f"observes every run: {', '.join(it.observes)}" if it.observes else ""
    remedy = ""
    if it.status == "disabled":
        remedy = f"remove {it.distribution} from {it.reason.removeprefix('by ')}"
    elif it.status == "broken":
        cure = f'python -c "import {it.module.partition(":")[0]}" shows the whole traceback'
        if isinstance(it.error, InvalidPlugin):
            cure = "docs/plugin-api.md has the hooks and rules"
        remedy = f"if the plugin is yours: {cure}\n{DISABLE_VARIABLE}={it.distribution} hides this message"
    about = (it.entry_point, it.distribution, it.version, it.status, it.reason, summary)
    return Row("plugin", *about, remedy, _place(it))


def _place(record: PluginRecord) -> str:
    """Write ``at file:line in function``: the innermost frame in the plugin's own package."""
    error = record.error
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}:{error.lineno}"
    code, line = getattr(getattr(error, "function", None), "__code__", None), 0
    for frame, number in traceback.walk_tb(error.__traceback__ if error and code is None else None):
        if _top(str(frame.f_globals.get("__name__"))) == _top(record.module):
            code, line = frame.f_code, number
    if not isinstance(code, CodeType):
        return ""
    function = "" if code.co_name == "<module>" else f" in {code.co_qualname}"
    return f"at {code.co_filename}:{line or code.co_firstlineno}{function}"


def _top(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]


def as_table(listed: Iterable[Row], why: bool = False) -> Table:
    """Draw the list for a terminal; a row that is not ok shows its reason instead of its summary.

    Args:
        why: add the place and the remedy.
    """
    table = folding_table("kind", "name")
    for row in listed:
        text = Text(f"{row.name}  {row.distribution} {row.version}  ")
        text.append(row.status, STYLES.get(row.status, "red"))
        text.append(f"\n{row.why}\n-> {row.remedy}" if why else f"\n{row.reason or row.summary}".rstrip())
        table.add_row(row.kind, text)
    return table


# -- grpox plugins show -------------------------------------------------------------------------------------


def select(plugins: PluginSet, name: str) -> list[Offer]:
    """Find all components that match ``NAME``, ``kind/NAME``, ``dist:NAME`` or ``kind/dist:NAME``.

    Raises:
        ConfigError: no component matches.
    """
    kind, _, rest = name.rpartition("/")
    distribution, _, bare = rest.rpartition(":")
    if offers := plugins.offers_called(bare, kind, distribution):
        return offers
    known = {
        f"{prefix}{spelling}"
        for offer in plugins.offers
        for prefix in ("", f"{offer.kind}/")
        for spelling in (offer.spec.name, offer.qualified_name)
    }
    low = name.lower()
    near = min((each for each in known if each.startswith(low)), key=len, default=nearest(low, sorted(known)))
    allowed = "" if near else "the names in: grpox plugins list"
    problem = Problem("no such component", given=name, allowed=allowed, nearest=near)
    raise ConfigError([problem, *map(Problem, plugins.suspicions())])


def details(plugins: PluginSet, offer: Offer) -> Group:
    """Draw all details of one component for a terminal. Imports its config, but not its target."""
    spec = offer.spec
    facts = {
        "summary": spec.summary,
        "status": "" if offer.status == "ok" else f"{offer.status}: {offer.reason}",
        "formula": spec.formula or "none given",
        "source": spec.source or "none given",
        "needs": ", ".join(spec.needs) or "nothing",
        "provides": ", ".join(spec.provides) or "nothing",
        "requires": ", ".join(spec.requires),
        "target": spec.target,
        "config": spec.config,
        "plugin API": str(spec.api),
    }
    heading = Text.assemble((spec.name, "bold"), f"  {offer.kind}, {offer.origin}")
    about = Table.grid(padding=(0, 2))
    about.add_column()
    about.add_column(overflow="fold")
    for label, fact in facts.items():
        if fact:
            about.add_row(label, Text(fact))
    return Group(heading, *(Padding(each, (0, 0, 1, 2)) for each in (about, _parameters(plugins, offer))))


def _parameters(plugins: PluginSet, offer: Offer) -> RenderableType:
    # Imported late, as a list of components needs nothing that reads run files.
    from grpox.plugins.registry import Registry

    try:
        model = Registry(plugins).config_model(offer)
    except ConfigError as error:
        return Text(f"parameters unknown: {error}")
    if model is None or not model.model_fields:
        return Text("no parameters")
    table = folding_table("parameter", "")
    for key, field in fields_by_key(model).items():
        default = "required"
        if field.default_factory is not None and field.default_factory_takes_validated_data:
            default = "default from the others"
        elif not field.is_required():
            default = f"default {written(field.get_default(call_default_factory=True))}"
        description = " ".join((field.description or "").split())
        table.add_row(*map(Text, (key, f"{allowed_values(field)}; {default}\n{description}".strip())))
    return table


# -- grpox plugins diff ----------------------------------------------------------------------------------


def as_differences(differences: Iterable[Difference], old: str, new: str) -> Table:
    """Draw the differences between the locks of two runs for a terminal."""
    table = folding_table("", "what", *map(escape, (old, new)))
    styles = {"drift": "red", "environment": "yellow"}
    for each in differences:
        severity = Text(each.severity.value, styles.get(each.severity.value, ""))
        table.add_row(severity, Text(each.what), Text(each.old), Text(each.new))
    return table
