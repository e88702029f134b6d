"""Tells, once for each command, what a user asked of plugin discovery that could not be done."""

from __future__ import annotations

import typer

from grpox.errors.redaction import redact
from grpox.plugins.discovery import PluginSet, discover
from grpox.runtime import launch


def discovered() -> PluginSet:
    """The installed plugins, their warnings told."""
    plugins = discover()
    tell_warnings(plugins)
    return plugins


def tell_warnings(plugins: PluginSet) -> None:
    """Print the warnings on standard error; of several ranks, the first one does."""
    for warning in plugins.warnings:
        warn(warning)


def warn(text: str) -> None:
    """Print one on standard error; of several ranks, the first one does."""
    if launch.rank_told() == 0:
        typer.secho(redact(f"warning: {text}"), fg=typer.colors.YELLOW, err=True)
