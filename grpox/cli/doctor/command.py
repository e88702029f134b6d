"""`grpox doctor`: the command, its table and its JSON; importing it imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json as json_format
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from grpox.cli.doctor.checkup import Checkup

_STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "bold red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Look at the environment: versions, what fits together, devices, launchers, generators.

    The exit code is 0 if grpox can train here, and 1 if not. Nothing is
    installed or changed, and the network is not used.

    \b
    Examples:
      grpox doctor
      grpox doctor --json
    """
    from grpox.cli.discovery import discovered
    from grpox.cli.doctor.checkup import check_up

    checkup = check_up(discovered())
    if json:
        typer.echo(as_json(checkup))
    else:
        from rich.console import Console

        Console().print(as_table(checkup))
        typer.echo("grpox can train here" if checkup.can_train else "grpox cannot train here: mend the errors")
    if not checkup.can_train:
        raise typer.Exit(1)


def as_json(checkup: Checkup) -> str:
    """An object with `can_train` and the fields of each `Finding`."""
    findings = [dataclasses.asdict(finding) for finding in checkup.findings]
    return json_format.dumps({"can_train": checkup.can_train, "findings": findings}, indent=2)


def as_table(checkup: Checkup) -> Table:
    """One row for each finding, its remedy below it; each section is named once."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "name", "status", ""):
        # Folded: a command that is cut cannot be copied.
        table.add_column(heading, overflow="fold")
    for section, findings in groupby(checkup.findings, lambda finding: finding.section):
        for position, finding in enumerate(findings):
            told = [Text(finding.told), *([Text(f"-> {finding.remedy}", "bold")] if finding.remedy else [])]
            table.add_row(
                section if position == 0 else "",
                finding.name,
                Text(finding.status, _STYLES[finding.status]),
                Text("\n").join(told),
            )
    return table
