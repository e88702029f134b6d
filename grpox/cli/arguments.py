"""Arguments that several commands take, and the run that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

RUN_HELP = "A run file (YAML), or the name of a recipe: grpox recipes list."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the run, for example train.max_steps=10 or loss.clip_high=0.28; values are YAML.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", min=1, metavar="P", help="Ranks to check for.", show_default="this launch's"),
]


def load_named_run(run: str, overrides: list[str] | None, world_size: int | None = None) -> ResolvedRun:
    """Check the run that a command line names, and tell what plugin discovery warns of."""
    from grpox.cli.discovery import tell_warnings
    from grpox.runfile.load import load_run

    resolved = load_run(run, overrides or (), world_size)
    tell_warnings(resolved.registry.plugins)
    return resolved
