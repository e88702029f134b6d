"""`grpox recipes`: list the bundled run files, copy one to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Bundled run files: list them, or copy one to start from.")


@app.command("list")
def list_recipes() -> None:
    """Each recipe's name and what it does. `grpox train NAME` runs one as it is."""
    from grpox.runfile.recipe_files import recipe_names, recipe_summary

    names = recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        typer.echo(f"{name:<{width}}  {recipe_summary(name)}")


@app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="The recipe, as `grpox recipes list` calls it.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Copy a recipe's YAML, and the folder of its inputs beside it, to change them.

    \b
    Example:
      grpox recipes copy quickstart
      grpox train quickstart.yaml
    """
    from grpox.runfile.recipe_files import copy_recipe

    for path in copy_recipe(name, folder, force):
        typer.echo(path)
