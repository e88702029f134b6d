"""The commands ``grpox plugins list`` and ``grpox plugins show``; importing them imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """What is installed: components, their parameters, plugins that did not load.

\b
Examples:
  grpox plugins list --kind loss
  grpox plugins show dapo
"""
NARROW = 100
"""Columns of a terminal below which cells of a table are written below one another."""

app = typer.Typer(no_args_is_help=True, help=HELP)


@app.command("list")
def list_components(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list, for programs.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Only this kind, such as loss or reward.", show_default="all"),
    ] = None,
) -> None:
    """List every component that is installed, and every plugin that did not load.

    \b
    Examples:
      grpox plugins list
      grpox plugins list --kind reward
      grpox plugins list --json
    """
    from grpox.cli.discovery import discovered
    from grpox.cli.plugin_report import as_json, as_table, rows

    listed = rows(discovered(), kind)
    if json:
        typer.echo(as_json(listed))
        return
    from rich.console import Console

    console = Console()
    console.print(as_table(listed, narrow=console.width < NARROW))


@app.command("show")
def show_component(
    name: Annotated[str, typer.Argument(metavar="NAME", help="NAME, KIND/NAME, DIST:NAME or KIND/DIST:NAME.")],
) -> None:
    """Show a component's parameters, formula, source and capabilities.

    \b
    Examples:
      grpox plugins show dapo
      grpox plugins show reward/math             where several kinds have a math
      grpox plugins show my-plugin:dapo          where several plugins offer one
    """
    from rich.console import Console

    from grpox.cli.discovery import discovered
    from grpox.cli.plugin_details import details, select

    plugins, console = discovered(), Console()
    for offer in select(plugins, name):
        console.print(details(plugins, offer, narrow=console.width < NARROW))
