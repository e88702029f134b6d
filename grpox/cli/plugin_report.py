"""The rows of ``grpox plugins list``: every component and command, every plugin that failed or acts unasked."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpox.cli.commands import conflict
from grpox.errors import ConfigError, Problem, nearest
from grpox.plugins.discovery import Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.hookspecs import KINDS

if TYPE_CHECKING:
    from rich.table import Table

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
    holders = Counter((offer.kind, offer.spec.name) for offer in plugins.offers)
    spellings = Counter((offer.kind, offer.qualified_name) for offer in plugins.offers)
    components = [
        _component_row(
            offer, holders[offer.kind, offer.spec.name] > 1, spellings[offer.kind, offer.qualified_name] > 1
        )
        for offer in plugins.offers
    ]
    order = list(KINDS)
    components.sort(key=lambda row: (order.index(row.kind), row.name, row.distribution))
    others = [row for record in plugins.records if (row := _plugin_row(record)) is not None]
    commands = sorted((_command_row(each, plugins) for each in plugins.commands), key=lambda row: row.name)
    return [row for row in [*components, *commands, *others] if kind in (None, row.kind)]


def _component_row(offer: Offer, held_twice: bool, spelt_alike: bool) -> Row:
    status, reason = str(offer.status), offer.reason
    if held_twice:
        said = f"another plugin offers this name too: say {offer.qualified_name}"
        if spelt_alike:
            said = "its distribution offers this name twice: one has to be renamed"
        status, reason = "conflict", f"{said}; {reason}" if reason else said
    spec = offer.spec
    return Row(offer.kind, spec.name, offer.distribution, offer.version, status, reason, spec.summary)


def _command_row(command: OfferedCommand, plugins: PluginSet) -> Row:
    taken, lacks = conflict(command, plugins.commands), command.lacks
    status = "conflict" if taken else "unavailable" if lacks else "ok"
    spec = command.spec
    return Row(
        COMMAND_KIND, spec.name, command.distribution, command.version, status, taken or lacks, spec.help
    )


def _plugin_row(record: PluginRecord) -> Row | None:
    """A row for a plugin that did not load, or acts without being selected."""
    if record.status == "ok" and not record.observes:
        return None
    summary = f"observes every run: {', '.join(record.observes)}" if record.observes else ""
    return Row(
        PLUGIN_KIND,
        record.entry_point,
        record.distribution,
        record.version,
        record.status,
        record.reason,
        summary,
    )


def as_json(listed: Iterable[Row]) -> str:
    """A JSON list of objects with the fields of `Row`."""
    return json.dumps([dataclasses.asdict(row) for row in listed], indent=2)


def as_table(listed: Iterable[Row], narrow: bool = False) -> Table:
    """The list for a terminal; a row that is not ok gives its reason in place of its summary.

    Args:
        narrow: write all but the kind below one another, for a terminal too narrow for five columns.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

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
