"""Rows of ``grpox plugins list``: components, commands, plugins that failed or that observe every run.

``--why`` explains each row that is not ok.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from types import CodeType

from packaging.requirements import InvalidRequirement, Requirement
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.cli.app import conflict
from grpox.errors import ConfigError, nearest
from grpox.errors.formatting import with_article
from grpox.plugins.discovery import DISABLE_VARIABLE, Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.hookspecs import KINDS
from grpox.plugins.requirements import canonical_name, unmet

COMMAND_KIND = "command"
"""Kind of rows for commands of the command line."""
PLUGIN_KIND = "plugin"
"""Kind of rows for plugins that did not load or that observe every run."""
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
    source: Offer | OfferedCommand | PluginRecord = field(repr=False)
    """Component, command or plugin of the row."""

    def as_dict(self) -> dict[str, str]:
        """Return the texts of the row by name."""
        return {name: value for name, value in vars(self).items() if name != "source"}


def rows(plugins: PluginSet, kind: str | None = None) -> list[Row]:
    """List all components by kind and name, then commands, then plugins that have their own row.

    Args:
        plugins: the discovered plugins.
        kind: kind of rows to list; None lists all.

    Raises:
        ConfigError: the kind does not exist.
    """
    kinds = [*KINDS, COMMAND_KIND, PLUGIN_KIND]
    if kind is not None and kind not in kinds:
        near = nearest(kind, kinds)
        raise ConfigError("no such kind", "--kind", given=kind, allowed=", ".join(kinds), nearest=near)
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
        said = f"another plugin also offers this name: write {offer.qualified_name}"
        if sum(other.qualified_name == offer.qualified_name for other in same) > 1:
            said = "its distribution offers this name twice: rename one of the two"
        status, reason = "conflict", f"{said}; {reason}" if reason else said
    return Row(offer.kind, spec.name, offer.distribution, offer.version, status, reason, spec.summary, offer)


def _command_row(command: OfferedCommand, plugins: PluginSet) -> Row:
    clash, lacks, spec = conflict(command, plugins.commands), command.lacks, command.spec
    status = "conflict" if clash else "unavailable" if lacks else "ok"
    reason = clash.what if clash else lacks
    return Row(
        COMMAND_KIND, spec.name, command.distribution, command.version, status, reason, spec.help, command
    )


def _plugin_row(it: PluginRecord) -> Row:
    summary = f"observes every run: {', '.join(it.observes)}" if it.observes else ""
    return Row(PLUGIN_KIND, it.entry_point, it.distribution, it.version, it.status, it.reason, summary, it)


def as_json(listed: Iterable[Row], whys: Sequence[Why] = ()) -> str:
    """Write a JSON list of objects with the fields of `Row`, and of `Why` if explanations are passed."""
    objects = zip_longest(listed, whys)
    return json.dumps([row.as_dict() | (asdict(why) if why else {}) for row, why in objects], indent=2)


def as_table(listed: Iterable[Row], narrow: bool = False) -> Table:
    """Draw the list for a terminal; a row that is not ok shows its reason instead of its summary.

    Args:
        narrow: stack all cells but the kind, for a terminal too narrow for five columns.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kind", "name") if narrow else ("kind", "name", "distribution", "status", ""):
        # Long names are folded, not cut, so that they can be copied to `plugins show`.
        table.add_column(heading, overflow="fold")
    for row in listed:
        name, origin = Text(row.name), Text(f"{row.distribution} {row.version}")
        status, text = Text(row.status, STYLES.get(row.status, "red")), Text(row.reason or row.summary)
        stacked = Text("\n").join([Text("  ").join([name, origin, status]), *([text] if text else [])])
        table.add_row(row.kind, *([stacked] if narrow else [name, origin, status, text]))
    return table


# -- Explanations of rows that are not ok ----------------------------------------------------------------

_AUTHORS_PAGE = "docs/plugin-api.md describes the changes and how to adapt to them."


@dataclass(frozen=True)
class Why:
    """Reason and remedy for a row's status, in whole sentences; both are empty for a row that is ok."""

    why: str = ""
    remedy: str = ""


def explain(plugins: PluginSet, row: Row) -> Why:
    """Explain the status of a row."""
    source = row.source
    if isinstance(source, PluginRecord):
        return _of_record(source)
    if isinstance(source, OfferedCommand):
        return _of_command(plugins, source)
    reasons = [part for part in (_of_conflict(plugins, source), _of_offer(source)) if part.why]
    return Why("\n".join(part.why for part in reasons), "\n".join(part.remedy for part in reasons))


def as_paragraphs(listed: Sequence[Row], whys: Sequence[Why]) -> Group:
    """Draw a paragraph for each explained row, and count the other rows."""
    explained = [(row, why) for row, why in zip(listed, whys, strict=True) if why.why]
    others = len(listed) - len(explained)
    last = Text(f"{others} {'other ' if explained else ''}{'row is' if others == 1 else 'rows are'} ok", "dim")
    return Group(*(_paragraph(row, why) for row, why in explained), last)


def _paragraph(row: Row, why: Why) -> RenderableType:
    origin = f"  {row.kind}, {row.distribution} {row.version}  "
    heading = Text.assemble((row.name, "bold"), origin, (row.status, STYLES.get(row.status, "red")))
    return Group(heading, labelled({"why": why.why, "do": why.remedy}))


def labelled(texts: Mapping[str, str]) -> RenderableType:
    """Draw indented texts, each beside its label."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in texts.items():
        table.add_row(label, Text(text))
    return Padding(table, (0, 0, 1, 2))


def _of_conflict(plugins: PluginSet, offer: Offer) -> Why:
    kind, name = offer.kind, offer.spec.name
    same = plugins.offers_called(name, kind)
    mine = [each for each in same if each.distribution == offer.distribution]
    if len(same) == 1:
        return Why()
    if len(mine) > 1:
        modules = " and ".join(each.module for each in mine)
        why = f"{offer.origin} offers {with_article(kind)} '{name}' more than once, in {modules}."
        return Why(why, "Its author has to rename one of them: a run file cannot distinguish them.")
    holders = " and ".join(each.origin for each in same)
    others = sorted({each.distribution for each in same} - {offer.distribution})
    remedy = f"To use this one, write its full name in the run file: {offer.qualified_name}"
    # grpox cannot run without its own plugins.
    if "grpox" not in others:
        switch = f"{DISABLE_VARIABLE}={','.join(others)}"
        remedy += f"\nOr switch off the other one; then '{name}' is enough: {switch}"
    return Why(
        f"{holders} both offer {with_article(kind)} '{name}', and grpox does not choose between them.", remedy
    )


def _of_offer(offer: Offer) -> Why:
    if offer.status == "incompatible":
        dist, version = offer.distribution, offer.version
        newer = f"pip install --upgrade grpox\nOr, to keep this grpox: pip install '{dist}<{version}'"
        older = f"pip install --upgrade {dist}\nIf the plugin is yours: {_AUTHORS_PAGE}"
        return Why(f"It is {offer.reason}.", newer if "upgrade grpox" in offer.reason else older)
    return _of_requirements(offer, offer.reason) if offer.status == "unavailable" else Why()


def _of_command(plugins: PluginSet, command: OfferedCommand) -> Why:
    if clash := conflict(command, plugins.commands):
        return Why(f"{clash.what}.", clash.allowed)
    return _of_requirements(command, command.lacks) if command.lacks else Why()


def _of_requirements(offer: Offer | OfferedCommand, reason: str) -> Why:
    spec = offer.spec
    remedies = [spec.install] if spec.install else []
    invalid = []
    for requirement in filter(unmet, spec.requires):
        first = requirement.partition("|")[0].strip()
        try:
            Requirement(first)
            remedies += [] if spec.install else [f"pip install '{first}'"]
        except InvalidRequirement:
            invalid.append(requirement)
    if invalid:
        mend = f"Its author has to correct requires={invalid}"
        remedies.append(f"{mend}: packaging.python.org describes the format.")
    sentence = f"It {reason}" if reason.startswith("needs ") else reason
    return Why(f"{sentence}.", "\n".join(dict.fromkeys(remedies)))


def _of_record(record: PluginRecord) -> Why:
    if record.status == "broken":
        why = f"{record.reason}\n{_place(record)}".strip()
        silence = f"{DISABLE_VARIABLE}={record.distribution} hides this message."
        return Why(why, f"{_mending(record)}\nRuns that do not use the plugin are not affected; {silence}")
    return _of_disabled(record) if record.status == "disabled" else Why()


def _of_disabled(record: PluginRecord) -> Why:
    if DISABLE_VARIABLE not in record.reason:
        why = f"It is switched off {record.reason}."
        return Why(why, f"Remove {record.distribution} from `plugins: {{disable: [...]}}` in the run file.")
    value = os.environ.get(DISABLE_VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    rest = [name for name in names if canonical_name(name) != canonical_name(record.distribution)]
    command = f"export {DISABLE_VARIABLE}={','.join(rest)}" if rest else f"unset {DISABLE_VARIABLE}"
    return Why(f"It is switched off: {DISABLE_VARIABLE} is '{value}' in this environment.", command)


def _mending(record: PluginRecord) -> str:
    error = record.error
    if isinstance(error, ModuleNotFoundError) and error.name and _top(error.name) != _top(record.module):
        return (
            f"Install the package with the module '{error.name}' in this environment.\n"
            f"If the plugin is yours, add the package to the dependencies of {record.distribution}. If not "
            "every user needs it, import it in the component's module and add it to `requires`."
        )
    if type(error).__name__ == "InvalidPlugin":
        return "If the plugin is yours, correct it: docs/plugin-api.md has the hooks and rules."
    module = record.module.partition(":")[0]
    return f'If the plugin is yours, correct it; python -c "import {module}" shows the whole traceback.'


def _place(record: PluginRecord) -> str:
    """Write ``at file:line in function``: the innermost frame in the plugin's code, else the last frame."""
    error = record.error
    if error is None:
        return ""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}:{error.lineno}"
    code = getattr(getattr(error, "function", None), "__code__", None)
    if isinstance(code, CodeType):
        return f"at {code.co_filename}:{code.co_firstlineno} in {code.co_qualname}"
    frames = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [frame for frame in frames if _top(frame[0]) == _top(record.module)]
    theirs = [frame for frame in frames if _top(frame[0]) not in ("grpox", "importlib")]
    if not (own or theirs):
        return ""
    _, file, line, function = (own or theirs)[-1]
    return f"at {file}:{line}" + ("" if function == "<module>" else f" in {function}")


def _top(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]
