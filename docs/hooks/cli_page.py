"""The page of commands, from the typer application itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from field_table import table
from prose import prose

from grpox.cli.app import all_commands


def commands() -> str:
    """Markdown: a section for each command, with its usage, help, arguments and options."""
    root = all_commands()
    return "\n\n".join(_blocks(root, typer.Context(root, info_name="grpox")))


def _blocks(command: Any, context: Any) -> Iterator[str]:
    yield f"## {context.command_path}"
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```"
    yield help_text(command.help or "")
    for kind in ("argument", "option"):
        shown = [p for p in command.params if p.param_type_name == kind and not getattr(p, "hidden", False)]
        rows = [_row(parameter, context) for parameter in shown]
        if rows:
            yield table((kind, "meaning"), rows)
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _blocks(child, typer.Context(child, info_name=name, parent=context))


def _row(parameter: Any, context: Any) -> tuple[str, str]:
    names, told = parameter.get_help_record(context)
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    return f"`{names}`", prose(told)


def help_text(text: str) -> str:
    r"""A command's help as Markdown: what follows a ``\b`` keeps its lines, and examples become code."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", inspect.cleandoc(text)))


def _paragraph(text: str) -> str:
    if not text.startswith("\b"):
        return prose(text)
    heading, *lines = text.removeprefix("\b\n").splitlines()
    return f"{prose(heading)}\n\n```text\n{inspect.cleandoc(chr(10).join(['', *lines]))}\n```"
