"""`grpox train`: a run from its file to the trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from grpox.cli.arguments import LogFile, LogLevel, Overrides, follow_log_options, load_named_run
from grpox.cli.errors import TRACEBACK

Traceback = Annotated[
    bool, typer.Option(TRACEBACK, help="Show where an error was raised; every command takes it.")
]


def train(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run file, or the name of a recipe.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="DIR", help="Go on with the run in DIR; auto: in RUN's output_dir."),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume even with another config, data or plugins.")
    ] = False,
    log_level: LogLevel = "info",
    log_file: LogFile = None,
    traceback: Traceback = False,
) -> None:
    """Train: check the run file, then sample, score and update until it is done.

    \b
    Examples:
      grpox train quickstart
      grpox train run.yaml train.max_steps=10 output_dir=runs/try
      grpox train run.yaml loss=dr_grpo rewards.0.weight=2
      grpox train --resume runs/try          go on where it stopped
      grpox train run.yaml --resume auto     or begin, where there is nothing yet
      torchrun --nproc-per-node 8 -m grpox train run.yaml
    """
    follow_log_options(log_level, log_file)
    needs_checkpoint = False
    if resume is not None:
        from grpox.cli.resume import AUTO, run_to_resume

        needs_checkpoint = resume != AUTO
        run, overrides = run_to_resume(run, overrides or (), resume)
    if run is None:
        raise typer.BadParameter(
            "name a run file or recipe, or a run's folder by --resume", context, param_hint="RUN"
        )
    resolved = load_named_run(run, overrides)
    # Only now, because it imports torch: a mistake in the run file is told at once.
    from grpox.training.run import train_run

    train_run(resolved, resume is not None, allow_changes, needs_checkpoint)
