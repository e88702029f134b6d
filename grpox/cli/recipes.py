"""`grpox recipes`: lists the bundled run files and copies them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """List the bundled run files, or copy one as a starting point.

\b
Examples:
  grpox recipes list
  grpox recipes copy quickstart
"""

app = typer.Typer(no_args_is_help=True, help=HELP)


@app.command("list")
def list_recipes() -> None:
    """List the recipes with a description of each. `grpox train NAME` runs one unchanged.

    \b
    Example:
      grpox recipes list
    """
    from grpox.runfile.recipe_files import recipe_names, recipe_summary

    names = recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        typer.echo(f"{name:<{width}}  {recipe_summary(name)}")


@app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe in `grpox recipes list`.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write to; created if missing.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Copy a recipe's YAML file and the folder of its inputs, to change them.

    \b
    Examples:
      grpox recipes copy quickstart           then: grpox train quickstart.yaml
      grpox recipes copy smollm2 experiments --force
    """
    from grpox.runfile.recipe_files import copy_recipe

    for path in copy_recipe(name, folder, force):
        typer.echo(path)
