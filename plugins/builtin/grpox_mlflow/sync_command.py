"""`grpox sync`: writes to MLflow what it lacks of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sync(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder: its output_dir.")],
    tracking_uri: Annotated[
        str | None,
        typer.Option("--tracking-uri", metavar="URI", help="Another store.", show_default="the run's own"),
    ] = None,
) -> None:
    """Write to MLflow what it lacks of a run, whose server was away for a while or from the start.

    The run's folder holds everything: each metric with its time, parameters,
    tags, completions, the report, and how the run ended. What MLflow has
    already is left alone, so that syncing twice does the same as once. A run
    that was killed and has no ending is KILLED.

    \b
    Examples:
      grpox sync runs/quickstart
      grpox sync runs/quickstart --tracking-uri http://127.0.0.1:5000
    """
    from rich.console import Console
    from rich.progress import Progress

    from grpox.toolkit import counted
    from grpox_mlflow.sync import sync as write_missing

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("metrics", total=None)
        done = write_missing(
            run_dir,
            tracking_uri,
            lambda position, size: bar.update(task, completed=position, total=size),
        )
    missing = f"{counted(done.values, 'value')} and {counted(done.files, 'completion file')} written"
    typer.echo(f"{run_dir} ({done.status}): {missing}\n{done.place}")
