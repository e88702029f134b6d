"""`grpox recipes`: list the bundled run files, copy one to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Bundled run files: list them, or copy one to start from.

\b
Examples:
  grpox recipes list
  grpox recipes copy quickstart
"""

app = typer.Typer(no_args_is_help=True, help=HELP)


@app.command("list")
def list_recipes() -> None:
    """List the recipes and what each does. `grpox train NAME` runs one as it is.

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
    name: Annotated[str, typer.Argument(metavar="NAME", help="The recipe, as `grpox recipes list` calls it.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write it; it is made if need be.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Copy a recipe's YAML, and the folder of its inputs beside it, to change them.

    \b
    Examples:
      grpox recipes copy quickstart           then: grpox train quickstart.yaml
      grpox recipes copy smollm2 experiments --force
    """
    from grpox.runfile.recipe_files import copy_recipe

    for path in copy_recipe(name, folder, force):
        typer.echo(path)
