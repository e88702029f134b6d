"""The rows of ``grpox plugins list``: every component and command, every plugin that failed or acts unasked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from grpox.cli.commands import conflict
from grpox.errors import ConfigError, Problem, nearest
from grpox.plugins.discovery import Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.hookspecs import KINDS

COMMAND_KIND = "command"
"""Kind of the rows that are commands of the command line."""
PLUGIN_KIND = "plugin"
"""Kind of the rows that are no component: plugins that did not load, and those that observe every run."""
STYLES = {"ok": "green", "disabled": "dim", "unavailable": "yellow", "conflict": "red"}


@dataclass(frozen=True)
class Row:
    """One line of the list; `status` is the offer's or record's, or ``conflict`` for a name held twice."""

    kind: str
    name: str
    distribution: str
    version: str
    status: str
    reason: str
    """Why it is not ok."""
    summary: str
    source: Offer | OfferedCommand | PluginRecord = field(repr=False)
    """What the row tells of."""

    def as_dict(self) -> dict[str, str]:
        """The texts of the row by name."""
        return {name: value for name, value in vars(self).items() if name != "source"}


def rows(plugins: PluginSet, kind: str | None = None) -> list[Row]:
    """Every component, ordered by kind and name, then commands, and plugins that are told of by themselves.

    Args:
        plugins: as discovered.
        kind: only rows of this kind.

    Raises:
        ConfigError: there is no such kind.
    """
    kinds = [*KINDS, COMMAND_KIND, PLUGIN_KIND]
    if kind is not None and kind not in kinds:
        near = nearest(kind, kinds)
        raise ConfigError(Problem("no such kind", "--kind", given=kind, allowed=", ".join(kinds), nearest=near))
    components = sorted(
        (_component_row(offer, plugins) for offer in plugins.offers),
        key=lambda row: (kinds.index(row.kind), row.name, row.distribution),
    )
    commands = sorted((_command_row(each, plugins) for each in plugins.commands), key=lambda row: row.name)
    others = [_plugin_row(each) for each in plugins.records if each.status != "ok" or each.observes]
    return [row for row in (*components, *commands, *others) if kind in (None, row.kind)]


def _component_row(offer: Offer, plugins: PluginSet) -> Row:
    status, reason, spec = str(offer.status), offer.reason, offer.spec
    same = plugins.offers_called(spec.name, offer.kind)
    if len(same) > 1:
        said = f"another plugin offers this name too: say {offer.qualified_name}"
        if sum(other.qualified_name == offer.qualified_name for other in same) > 1:
            said = "its distribution offers this name twice: one has to be renamed"
        status, reason = "conflict", f"{said}; {reason}" if reason else said
    return Row(offer.kind, spec.name, offer.distribution, offer.version, status, reason, spec.summary, offer)


def _command_row(command: OfferedCommand, plugins: PluginSet) -> Row:
    taken, lacks, spec = conflict(command, plugins.commands), command.lacks, command.spec
    status = "conflict" if taken else "unavailable" if lacks else "ok"
    reason = taken or lacks
    return Row(
        COMMAND_KIND, spec.name, command.distribution, command.version, status, reason, spec.help, command
    )


def _plugin_row(it: PluginRecord) -> Row:
    summary = f"observes every run: {', '.join(it.observes)}" if it.observes else ""
    return Row(PLUGIN_KIND, it.entry_point, it.distribution, it.version, it.status, it.reason, summary, it)


def as_json(listed: Iterable[Row]) -> str:
    """A JSON list of objects with the fields of `Row`."""
    return json.dumps([row.as_dict() for row in listed], indent=2)


def as_table(listed: Iterable[Row], narrow: bool = False) -> Table:
    """The list for a terminal; a row that is not ok gives its reason in place of its summary.

    Args:
        narrow: write all but the kind below one another, for a terminal too narrow for five columns.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kind", "name") if narrow else ("kind", "name", "distribution", "status", ""):
        # Folded: a name that is cut cannot be given to `plugins show`.
        table.add_column(heading, overflow="fold")
    for row in listed:
        name, origin = Text(row.name), Text(f"{row.distribution} {row.version}")
        status, told = Text(row.status, STYLES.get(row.status, "red")), Text(row.reason or row.summary)
        stacked = Text("\n").join([Text("  ").join([name, origin, status]), *([told] if told else [])])
        table.add_row(row.kind, *([stacked] if narrow else [name, origin, status, told]))
    return table
