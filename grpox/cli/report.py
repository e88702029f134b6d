"""`grpox report`: makes the report of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpox.errors import ConfigError, Problem


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder: its output_dir.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where to write it.", show_default="RUN_DIR/report.html"),
    ] = None,
) -> None:
    """Make a run's report again: curves, completions, config and versions on one HTML page.

    Every run writes it when it ends. This command makes it from the files
    that are in the folder now, so that it also shows a run that is still
    going on, or one that was killed. The page needs no network.

    \b
    Examples:
      grpox report runs/quickstart
      grpox report runs/quickstart --output quick.html
    """
    from grpox.observing.report.page import write_report

    try:
        if output is not None and output.is_dir():
            raise ConfigError(Problem("is a folder: give a file", key="--output", given=str(output)))
        written = write_report(run_dir, output)
    except OSError as error:
        what = f"cannot be read or written: {error.strerror or error}"
        raise ConfigError(Problem(what, given=str(error.filename or run_dir))) from error
    typer.echo(written)
