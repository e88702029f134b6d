"""Tables of ``grpox plugins list`` and ``show``."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from types import CodeType

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.cli.app import conflict
from grpox.errors import ConfigError, Problem, nearest
from grpox.errors.console import folding_table
from grpox.errors.validation import allowed_values, fields_by_key, written
from grpox.plugins.discovery import DISABLE_VARIABLE, Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.hookspecs import KINDS

ROW_KINDS = (*KINDS, "command", "plugin")
"""Kinds of rows: of components, of commands, and of plugins that did not load or that observe every run."""
STYLES = {"ok": "green", "disabled": "dim", "unavailable": "yellow", "conflict": "red"}


Columns = dict[str, str]
"""One line of the list by the names of its columns, those of ``grpox plugins list --json --why``."""


def rows(plugins: PluginSet, kind: str | None = None) -> list[Columns]:
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
    listed = []
    for offer in plugins.offers:
        row = _row(offer.kind, offer.spec.name, offer, offer.spec.summary)
        same = plugins.offers_called(f"{offer.kind}/{offer.spec.name}")
        listed.append(row if len(same) == 1 else row | _clash(offer, same))
    listed.sort(key=lambda row: (ROW_KINDS.index(row["kind"]), row["name"], row["distribution"]))
    for each in sorted(plugins.commands, key=lambda each: each.spec.name):
        row = _row("command", each.spec.name, each, each.spec.help)
        if clash := conflict(each, plugins.commands):
            row |= {"status": "conflict", "reason": clash.what, "why": clash.what, "remedy": clash.allowed}
        listed.append(row)
    for record in plugins.records:
        if record.status != "ok" or record.observes:
            summary = f"observes every run: {', '.join(record.observes)}" if record.observes else ""
            row = _row("plugin", record.entry_point, record, summary)
            listed.append(row | {"why": f"{record.reason}\n{_place(record)}".strip()})
    return [row for row in listed if kind in (None, row["kind"])]


def _row(kind: str, name: str, it: Offer | OfferedCommand | PluginRecord, summary: str) -> Columns:
    about = {"kind": kind, "name": name, "distribution": it.distribution, "version": it.version}
    state = {"status": it.status, "reason": it.reason, "summary": summary}
    return about | state | {"why": it.reason, "remedy": it.remedy}


def _clash(offer: Offer, same: Sequence[Offer]) -> Columns:
    """Describe the conflict of components of one kind and name."""
    use = f"write {offer.qualified_name}"
    what = f"{' and '.join(each.origin for each in same)} offer this name: {use}"
    others = sorted({each.distribution for each in same} - {offer.distribution})
    # grpox cannot run without its own plugins.
    off = f"{DISABLE_VARIABLE}={','.join(others)}"
    switch = "" if not others or "grpox" in others else f"; or switch off the other: {off}"
    reason = "; ".join(filter(None, (what, offer.reason)))
    remedy = "\n".join(filter(None, (f"{use} in the run file{switch}", offer.remedy)))
    return {"status": "conflict", "reason": reason, "why": reason, "remedy": remedy}


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


def as_table(listed: Iterable[Columns], why: bool = False) -> Table:
    """Draw the list for a terminal; a row that is not ok shows its reason instead of its summary.

    Args:
        why: add the place and the remedy.
    """
    table = folding_table("kind", "name")
    for row in listed:
        text = Text(f"{row['name']}  {row['distribution']} {row['version']}  ")
        text.append(row["status"], STYLES.get(row["status"], "red"))
        message = f"{row['why']}\n-> {row['remedy']}" if why else f"{row['reason'] or row['summary']}".rstrip()
        table.add_row(row["kind"], text.append(f"\n{message}" if message else ""))
    return table


# -- grpox plugins show -------------------------------------------------------------------------------------


def select(plugins: PluginSet, name: str) -> list[Offer]:
    """Find the components that a name on the command line stands for, or raise ConfigError if none does."""
    if offers := plugins.offers_called(name):
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
    raise ConfigError([problem, *(record.suspicion for record in plugins.suspects())])


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
