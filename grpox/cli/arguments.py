"""Arguments and options that several commands share, and functions that load the run and the plugins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpox.errors import ConfigError, Problem, visible
from grpox.errors.redaction import redact
from grpox.plugins.discovery import DISABLE_VARIABLE, PluginSet, discover
from grpox.plugins.loader import Misbehaved
from grpox.runtime import launch
from grpox.runtime.logs import FILE_VARIABLE, LEVEL_VARIABLE, LEVELS, show_logs

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun

RUN_HELP = "A run file (YAML), or the name of a recipe: grpox recipes list."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides of the run file, such as train.max_steps=10 or loss.clip_high=0.28; values are YAML.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--world-size", min=1, metavar="P", help="Number of ranks to check for.", show_default="this launch's"
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        envvar=LEVEL_VARIABLE,
        show_envvar=False,
        help=f"Lowest level of messages to show: {', '.join(LEVELS)}.",
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        metavar="FILE",
        envvar=FILE_VARIABLE,
        show_envvar=False,
        help="Also write messages to this file; each rank above 0 writes a file beside it.",
    ),
]


def follow_log_options(level: str, file: Path | None = None) -> None:
    """Apply the log options in this process and its child processes."""
    show_logs(level, file)
    os.environ[LEVEL_VARIABLE] = level


def split_run(run: str | None, overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the run and the overrides; where the run was left out, the first override is in its place."""
    if run is not None and "=" in run and not Path(run).exists():
        return None, [run, *overrides]
    return run, list(overrides)


def load_named_run(run: str, overrides: list[str] | None, world_size: int | None = None) -> ResolvedRun:
    """Load and check the run named on the command line; print its warnings, and those of plugin discovery."""
    from grpox.runfile.load import load_run

    resolved = load_run(run, overrides or (), world_size)
    tell_warnings(resolved.registry.plugins)
    for warning in resolved.warnings:
        warn(warning)
    return resolved


def discovered() -> PluginSet:
    """Find the installed plugins, and print the warnings; raises as `tell_warnings` does."""
    plugins = discover()
    tell_warnings(plugins)
    return plugins


def tell_warnings(plugins: PluginSet) -> None:
    """Print the warnings of plugin discovery; raises ConfigError for plugins that misbehave."""
    for warning in plugins.warnings:
        warn(warning)
    if bad := [record for record in plugins.records if isinstance(record.error, Misbehaved)]:
        cure = f"{DISABLE_VARIABLE}={','.join(record.distribution for record in bad)}, or plugins.disable"
        raise ConfigError([Problem(f"{record} {record.error}", allowed=cure) for record in bad])


def warn(text: str) -> None:
    """Print a warning on standard error, only on rank 0."""
    if launch.rank_or_zero() == 0:
        typer.secho(visible(redact(f"warning: {text}")), fg=typer.colors.YELLOW, err=True)
