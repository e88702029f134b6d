"""What ``grpox plugins list --why`` adds: why a row is not ok, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import os
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from grpox.cli.commands import conflict, conflict_remedy
from grpox.cli.plugin_report import COMMAND_KIND, PLUGIN_KIND, STYLES, Row
from grpox.plugins.discovery import DISABLE_VARIABLE, Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.requirements import canonical_name, none_met

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


@dataclass(frozen=True)
class Why:
    """The reason of a row's status in whole sentences; both texts are empty where there is nothing to say."""

    why: str = ""
    remedy: str = ""


def explain(plugins: PluginSet, row: Row) -> Why:
    """Why a row is as it is."""
    if row.kind == PLUGIN_KIND:
        return _joined([_of_record(record) for record in plugins.records if _is_of(row, record)][:1])
    if row.kind == COMMAND_KIND:
        return _joined([_of_command(plugins, each) for each in plugins.commands if _is_command(row, each)][:1])
    same = [o for o in plugins.offers if (o.kind, o.spec.name) == (row.kind, row.name)]
    mine = [offer for offer in same if offer.distribution == row.distribution]
    parts = [_of_conflict(same, mine)] if len(same) > 1 else []
    return _joined([*parts, _of_offer(mine[0])])


def as_json(explained: Iterable[tuple[Row, Why]]) -> str:
    """As `plugin_report.as_json`, each object with ``why`` and ``remedy``."""
    return json.dumps([dataclasses.asdict(row) | dataclasses.asdict(why) for row, why in explained], indent=2)


def as_text(explained: Sequence[tuple[Row, Why]]) -> Group:
    """A paragraph for each row that has something to explain, and how many have not."""
    from rich.console import Group
    from rich.text import Text

    told = [(row, why) for row, why in explained if why.why]
    others = len(explained) - len(told)
    last = Text(f"{others} {'other ' if told else ''}{'row is' if others == 1 else 'rows are'} ok", "dim")
    return Group(*(_paragraph(row, why) for row, why in told), last)


def _paragraph(row: Row, why: Why) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    origin = f"  {row.kind}, {row.distribution} {row.version}  "
    heading = Text.assemble((row.name, "bold"), origin, (row.status, STYLES.get(row.status, "red")))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in (("why", why.why), ("do", why.remedy)):
        table.add_row(label, Text(text))
    return Group(heading, Padding(table, (0, 0, 1, 2)))


def _joined(parts: Iterable[Why]) -> Why:
    told = [part for part in parts if part.why]
    return Why("\n".join(part.why for part in told), "\n".join(part.remedy for part in told))


# -- Components ------------------------------------------------------------------------------------------


def _of_conflict(same: Sequence[Offer], mine: Sequence[Offer]) -> Why:
    kind, name = mine[0].kind, mine[0].spec.name
    if len(mine) > 1:
        modules = " and ".join(offer.module for offer in mine)
        why = f"{_dist(mine[0])} offers a {kind} '{name}' more than once, in {modules}."
        return Why(why, "Nothing in a run file tells them apart: its author has to rename one of them.")
    holders = " and ".join(_dist(offer) for offer in same)
    others = sorted({offer.distribution for offer in same} - {mine[0].distribution})
    remedy = f"To use this one, write its whole name in the run file: {mine[0].qualified_name}"
    # Without grpox's own plugins there would be no run.
    if "grpox" not in others:
        switch = f"{DISABLE_VARIABLE}={','.join(others)}"
        remedy += f"\nOr switch the other off, and '{name}' alone will do: {switch}"
    return Why(f"{holders} offer a {kind} '{name}', and grpox does not choose between them.", remedy)


def _of_offer(offer: Offer) -> Why:
    if offer.status == "incompatible":
        return _of_api(offer)
    if offer.status == "unavailable":
        return _of_requirements(offer, offer.reason)
    return Why()


_AUTHORS_PAGE = "What changed, and how to move, is in docs/plugin-api.md."


def _of_api(offer: Offer) -> Why:
    dist, version = offer.distribution, offer.version
    newer = f"pip install --upgrade grpox\nOr, for this grpox, an older one: pip install '{dist}<{version}'"
    older = f"pip install --upgrade {dist}\nIf it is yours: {_AUTHORS_PAGE}"
    return Why(f"It is {offer.reason}.", newer if "upgrade grpox" in offer.reason else older)


def _of_requirements(offer: Offer | OfferedCommand, reason: str) -> Why:
    spec = offer.spec
    lacking = [asked for asked in spec.requires if none_met(asked, spec.install)]
    commands = [spec.install] if spec.install else [command for asked in lacking if (command := _pip(asked))]
    unread = [asked for asked in lacking if not _pip(asked)]
    mend = [f"Its author has to mend requires={unread}: packaging.python.org says how they are written."]
    return Why(f"{_sentence(reason)}.", "\n".join([*dict.fromkeys(commands), *(mend if unread else [])]))


def _pip(asked: str) -> str:
    """The command that installs what is asked for, or the first of several; empty if that cannot be read."""
    from packaging.requirements import InvalidRequirement, Requirement

    first = asked.partition("|")[0].strip()
    try:
        Requirement(first)
    except InvalidRequirement:
        return ""
    return f"pip install '{first}'"


# -- Commands --------------------------------------------------------------------------------------------


def _of_command(plugins: PluginSet, command: OfferedCommand) -> Why:
    if taken := conflict(command, plugins.commands):
        return Why(f"{taken}.", conflict_remedy(command, plugins.commands))
    return _of_requirements(command, command.lacks) if command.lacks else Why()


def _is_command(row: Row, command: OfferedCommand) -> bool:
    return (row.name, row.distribution) == (command.spec.name, command.distribution)


# -- Plugins ---------------------------------------------------------------------------------------------


def _of_record(record: PluginRecord) -> Why:
    if record.status == "disabled":
        return _of_disabled(record)
    if record.status == "broken":
        return _of_broken(record)
    return Why()


def _of_disabled(record: PluginRecord) -> Why:
    if DISABLE_VARIABLE not in record.reason:
        why = f"It is switched off {record.reason}."
        return Why(why, f"Take {record.distribution} out of `plugins: {{disable: [...]}}` in the run file.")
    value = os.environ.get(DISABLE_VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    rest = [name for name in names if canonical_name(name) != canonical_name(record.distribution)]
    command = f"export {DISABLE_VARIABLE}={','.join(rest)}" if rest else f"unset {DISABLE_VARIABLE}"
    return Why(f"It is switched off: {DISABLE_VARIABLE} is '{value}' in this environment.", command)


def _of_broken(record: PluginRecord) -> Why:
    place = _place(record)
    return Why(f"{record.reason}\n{place}".strip(), f"{_mending(record)}\n{_without(record)}")


def _mending(record: PluginRecord) -> str:
    error = record.error
    if isinstance(error, ModuleNotFoundError) and error.name and _top(error.name) != _top(record.module):
        return (
            f"Install what holds the module '{error.name}' into this environment.\n"
            f"If the plugin is yours, name that in the dependencies of {record.distribution}; or, where not "
            "everyone needs it, import it in the component's own module and name it in `requires`."
        )
    if type(error).__name__ == "InvalidPlugin":
        return "If it is yours, mend it there: hooks and rules are in docs/plugin-api.md."
    module = record.module.partition(":")[0]
    return f'If it is yours, mend it there; python -c "import {module}" shows an import\'s whole traceback.'


def _without(record: PluginRecord) -> str:
    switch = f"{DISABLE_VARIABLE}={record.distribution}"
    return f"Runs that do not select it are not concerned; {switch} silences it."


def _place(record: PluginRecord) -> str:
    """``at file:line in function``: of the plugin's own code the innermost, else where it was raised."""
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


def _is_of(row: Row, record: PluginRecord) -> bool:
    return (row.name, row.distribution) == (record.entry_point, record.distribution)


def _dist(offer: Offer) -> str:
    return f"{offer.distribution} {offer.version}"


def _top(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]


def _sentence(text: str) -> str:
    return f"It {text}" if text.startswith("needs ") else text
