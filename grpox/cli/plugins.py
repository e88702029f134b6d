"""The commands ``grpox plugins list`` and ``grpox plugins show``; importing them imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="What is installed: components, parameters, broken plugins.")


@app.command("list")
def list_components(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    kind: Annotated[str | None, typer.Option(help="Only this kind, such as loss or reward.")] = None,
) -> None:
    """List every component that is installed, and every plugin that did not load."""
    from grpox.cli.plugin_report import as_json, as_table, rows
    from grpox.plugins import discover

    listed = rows(discover(), kind)
    if json:
        typer.echo(as_json(listed))
        return
    from rich.console import Console

    Console().print(as_table(listed))


@app.command("show")
def show_component(
    name: Annotated[str, typer.Argument(help="NAME, KIND/NAME, DIST:NAME or KIND/DIST:NAME.")],
) -> None:
    """Show a component's parameters, formula, source and capabilities."""
    from rich.console import Console

    from grpox.cli.plugin_details import details, select
    from grpox.plugins import discover

    plugins = discover()
    for offer in select(plugins, name):
        Console().print(details(plugins, offer))
