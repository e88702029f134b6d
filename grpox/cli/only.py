"""The part of the command line that one command line asks for.

typer builds every command before it looks for the one that is meant, which takes as long as that one's imports.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import typer
from typer.main import get_command_name
from typer.models import CommandInfo


def only(app: typer.Typer, arguments: Sequence[str]) -> typer.Typer:
    """`app` with no other command than the one that `arguments` begin with; all of it where they name none."""
    named = arguments[0] if arguments else ""
    commands = [command for command in app.registered_commands if _name(command) == named]
    groups = [copy.copy(group) for group in app.registered_groups if group.name == named]
    if not commands and not groups:
        return app
    for group in groups:
        if group.typer_instance is not None:
            group.typer_instance = only(group.typer_instance, arguments[1:])
    part = copy.copy(app)
    part.registered_commands, part.registered_groups = commands, groups
    return part


def _name(command: CommandInfo) -> str:
    return command.name or get_command_name(getattr(command.callback, "__name__", ""))
