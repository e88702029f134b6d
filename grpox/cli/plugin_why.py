"""What ``grpox plugins list --why`` adds: why a row is not ok, and what to do about it."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import CodeType

from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.cli.commands import conflict, conflict_remedy
from grpox.cli.plugin_list import STYLES, Row
from grpox.plugins.discovery import DISABLE_VARIABLE, Offer, OfferedCommand, PluginRecord, PluginSet
from grpox.plugins.requirements import canonical_name, none_met

_AUTHORS_PAGE = "What changed, and how to move, is in docs/plugin-api.md."


@dataclass(frozen=True)
class Why:
    """The reason of a row's status in whole sentences; both texts are empty where there is nothing to say."""

    why: str = ""
    remedy: str = ""


def explain(plugins: PluginSet, row: Row) -> Why:
    """Why a row is as it is."""
    source = row.source
    if isinstance(source, PluginRecord):
        return _of_record(source)
    if isinstance(source, OfferedCommand):
        return _of_command(plugins, source)
    told = [part for part in (_of_conflict(plugins, source), _of_offer(source)) if part.why]
    return Why("\n".join(part.why for part in told), "\n".join(part.remedy for part in told))


def as_json(explained: Iterable[tuple[Row, Why]]) -> str:
    """As `plugin_list.as_json`, each object with ``why`` and ``remedy``."""
    return json.dumps([row.as_dict() | asdict(why) for row, why in explained], indent=2)


def as_text(explained: Sequence[tuple[Row, Why]]) -> Group:
    """A paragraph for each row that has something to explain, and how many have not."""
    told = [(row, why) for row, why in explained if why.why]
    others = len(explained) - len(told)
    last = Text(f"{others} {'other ' if told else ''}{'row is' if others == 1 else 'rows are'} ok", "dim")
    return Group(*(_paragraph(row, why) for row, why in told), last)


def _paragraph(row: Row, why: Why) -> RenderableType:
    origin = f"  {row.kind}, {row.distribution} {row.version}  "
    heading = Text.assemble((row.name, "bold"), origin, (row.status, STYLES.get(row.status, "red")))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("why", Text(why.why))
    table.add_row("do", Text(why.remedy))
    return Group(heading, Padding(table, (0, 0, 1, 2)))


def _of_conflict(plugins: PluginSet, offer: Offer) -> Why:
    kind, name = offer.kind, offer.spec.name
    same = plugins.offers_called(name, kind)
    mine = [each for each in same if each.distribution == offer.distribution]
    if len(same) == 1:
        return Why()
    if len(mine) > 1:
        modules = " and ".join(each.module for each in mine)
        why = f"{offer.origin} offers a {kind} '{name}' more than once, in {modules}."
        return Why(why, "Nothing in a run file tells them apart: its author has to rename one of them.")
    holders = " and ".join(each.origin for each in same)
    others = sorted({each.distribution for each in same} - {offer.distribution})
    remedy = f"To use this one, write its whole name in the run file: {offer.qualified_name}"
    # Without grpox's own plugins there would be no run.
    if "grpox" not in others:
        switch = f"{DISABLE_VARIABLE}={','.join(others)}"
        remedy += f"\nOr switch the other off, and '{name}' alone will do: {switch}"
    return Why(f"{holders} offer a {kind} '{name}', and grpox does not choose between them.", remedy)


def _of_offer(offer: Offer) -> Why:
    if offer.status == "incompatible":
        dist, version = offer.distribution, offer.version
        newer = f"pip install --upgrade grpox\nOr, for this grpox, an older one: pip install '{dist}<{version}'"
        older = f"pip install --upgrade {dist}\nIf it is yours: {_AUTHORS_PAGE}"
        return Why(f"It is {offer.reason}.", newer if "upgrade grpox" in offer.reason else older)
    return _of_requirements(offer, offer.reason) if offer.status == "unavailable" else Why()


def _of_command(plugins: PluginSet, command: OfferedCommand) -> Why:
    if taken := conflict(command, plugins.commands):
        return Why(f"{taken}.", conflict_remedy(command, plugins.commands))
    return _of_requirements(command, command.lacks) if command.lacks else Why()


def _of_requirements(offer: Offer | OfferedCommand, reason: str) -> Why:
    spec = offer.spec
    remedies = [spec.install] if spec.install else []
    unread = []
    for asked in spec.requires:
        if none_met(asked, spec.install):
            first = asked.partition("|")[0].strip()
            try:
                Requirement(first)
                remedies += [] if spec.install else [f"pip install '{first}'"]
            except InvalidRequirement:
                unread.append(asked)
    if unread:
        remedies.append(
            f"Its author has to mend requires={unread}: packaging.python.org says how they are written."
        )
    sentence = f"It {reason}" if reason.startswith("needs ") else reason
    return Why(f"{sentence}.", "\n".join(dict.fromkeys(remedies)))


def _of_record(record: PluginRecord) -> Why:
    if record.status == "broken":
        why = f"{record.reason}\n{_place(record)}".strip()
        silence = f"{DISABLE_VARIABLE}={record.distribution} silences it."
        return Why(why, f"{_mending(record)}\nRuns that do not select it are not concerned; {silence}")
    return _of_disabled(record) if record.status == "disabled" else Why()


def _of_disabled(record: PluginRecord) -> Why:
    if DISABLE_VARIABLE not in record.reason:
        why = f"It is switched off {record.reason}."
        return Why(why, f"Take {record.distribution} out of `plugins: {{disable: [...]}}` in the run file.")
    value = os.environ.get(DISABLE_VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    rest = [name for name in names if canonical_name(name) != canonical_name(record.distribution)]
    command = f"export {DISABLE_VARIABLE}={','.join(rest)}" if rest else f"unset {DISABLE_VARIABLE}"
    return Why(f"It is switched off: {DISABLE_VARIABLE} is '{value}' in this environment.", command)


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


def _top(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]
