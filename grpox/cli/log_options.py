"""The options `--log-level` and `--log-file`, of commands that train, evaluate or compute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from grpox.runtime.logs import FILE_VARIABLE, LEVEL_VARIABLE, LEVELS, show_logs

LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        envvar=LEVEL_VARIABLE,
        show_envvar=False,
        help=f"Least level of messages: {', '.join(LEVELS)}.",
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        metavar="FILE",
        envvar=FILE_VARIABLE,
        show_envvar=False,
        help="Write messages there too; ranks above 0 beside it.",
    ),
]


def follow_log_options(level: str, file: Path | None = None) -> None:
    """Show and write records as the options say, in this process and in those that it starts."""
    show_logs(level, file)
    os.environ[LEVEL_VARIABLE] = level
