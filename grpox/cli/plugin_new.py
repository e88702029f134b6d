"""`grpox plugins new`: a distribution to start a plugin from."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpox.cli.arguments import discovered

if TYPE_CHECKING:
    from grpox.plugins.scaffold.make import Made

NOTES = {
    "src/{module}/{kind}.py": "what it computes; a comment marks the line to make yours",
    "src/{module}/config.py": "its parameters",
    "src/{module}/plugin.py": "what it tells grpox of itself",
    "tests/test_conformance.py": "that it holds to its contract",
    "tests/test_{test}.py": "its numbers, worked by hand",
}
WIDTH = 80
"""Columns of the list of other files; what is to be copied is not broken."""


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it: mine, or grpox-mine.")],
    kind: Annotated[
        str,
        typer.Option(
            "--kind", metavar="KIND", help="loss, reward, advantage, correction, generator or observer."
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where to make its folder, grpox-NAME.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Write over the files of an earlier one.")] = False,
) -> None:
    """Make a distribution that holds a new component: it installs, passes its tests and trains as it is.

    \b
    Examples:
      grpox plugins new mine --kind loss
      grpox plugins new grpox-mine --kind reward --folder ~/plugins
    """
    from grpox.plugins.scaffold.make import make

    typer.echo("\n".join(told(make(name, kind, folder, discovered(), force))))


def told(made: Made) -> list[str]:
    """Lines: what was made, and the commands that come next."""
    names, place = made.names, shlex.quote(str(made.folder))
    test = names.component.replace("-", "_")
    notes = {path.format(module=names.module, kind=names.kind, test=test): note for path, note in NOTES.items()}
    width = max(map(len, notes))
    others = "and " + ", ".join(path for path in made.files if path not in notes)
    return [
        f"{made.folder}: {names.kind} '{names.component}', as a distribution of its own",
        "",
        *(f"  {path:<{width}}  {note}" for path, note in notes.items()),
        textwrap.fill(others, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
        "",
        "Next:",
        f"  pip install -e {shlex.quote(f'{made.folder}[dev]')}",
        f"  grpox plugins check {names.component}",
        f"  pytest {place}",
        f"  {names.train_command}",
    ]
