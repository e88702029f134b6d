"""`grpox doctor`: what is installed, what of it fits together, and what this machine has."""

from __future__ import annotations

import dataclasses
import json as json_format
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import discovered
from grpox.cli.environment import (
    OPTIONAL,
    Finding,
    Status,
    devices,
    installed,
    launchers,
    misbuilt,
    misfits,
    requirements_of,
    version_of,
)
from grpox.plugins.discovery import PluginSet

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
    findings = check_up(discovered())
    can_train = all(finding.status != "error" for finding in findings)
    if json:
        told = {"can_train": can_train, "findings": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json_format.dumps(told, indent=2))
    else:
        Console().print(as_table(findings))
        typer.echo("grpox can train here" if can_train else "grpox cannot train here: mend the errors")
    if not can_train:
        raise typer.Exit(1)


def check_up(plugins: PluginSet) -> list[Finding]:
    """Look at the environment and the machine; no network, and torch is not imported in this process."""
    known = [requirement.name for requirement in requirements_of("grpox")] if version_of("grpox") else []
    of_plugins = [record.distribution for record in plugins.records]
    return [
        *installed(),
        *misfits([*known, *OPTIONAL, *of_plugins]),
        *misbuilt(),
        *devices(),
        *launchers(),
        *generators(plugins),
        *broken(plugins),
    ]


def generators(plugins: PluginSet) -> Iterator[Finding]:
    """Each generator that plugins offer: usable, or what it lacks and the command that installs it."""
    offers = [offer for offer in plugins.offers if offer.kind == "generator"]
    for offer in offers:
        if offer.status == "ok":
            yield Finding("generators", offer.spec.name, "ok", f"usable; {offer.spec.summary}")
        else:
            yield Finding("generators", offer.spec.name, "absent", offer.reason)
    if all(offer.status != "ok" for offer in offers):
        yield Finding("generators", "none", "error", "nothing can sample: no installed generator is usable")


def broken(plugins: PluginSet) -> Iterator[Finding]:
    """Plugins that did not load."""
    for record in plugins.records:
        if record.status != "ok":
            status: Status = "warning" if record.status == "broken" else "absent"
            told = f"{record} is {record.status}: {record.reason}"
            yield Finding("plugins", record.entry_point, status, told)


def as_table(findings: Sequence[Finding]) -> Table:
    """One row for each finding, its remedy below it; each section is named once."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "name", "status", ""):
        # Folded: a command that is cut cannot be copied.
        table.add_column(heading, overflow="fold")
    for section, of_section in groupby(findings, lambda finding: finding.section):
        for position, finding in enumerate(of_section):
            told = [Text(finding.told), *([Text(f"-> {finding.remedy}", "bold")] if finding.remedy else [])]
            status = Text(finding.status, _STYLES[finding.status])
            table.add_row("" if position else section, finding.name, status, Text("\n").join(told))
    return table
