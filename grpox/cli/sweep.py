"""`grpox sweep`: trains a grid of runs and prints a table of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpox.cli.arguments import LogLevel, follow_log_options
from grpox.errors import ConfigError
from grpox.runtime import launch


def sweep(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run file (YAML), or the name of a recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE,VALUE",
            help="Values to combine, separated by commas; a single value goes to all runs. Values are YAML.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N", help="Values of train.seed.", show_default="the run's own")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="The sweep's folder.", show_default="output_dir-sweep"),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            metavar="N",
            help="Number of runs at a time; each has its own GPUs if there are enough.",
        ),
    ] = 1,
    nproc_per_node: Annotated[
        int,
        typer.Option(
            min=1, metavar="P", help="Number of ranks of each run, started by torchrun on this machine."
        ),
    ] = 1,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Metric whose last value ranks the runs.",
            show_default="evaluation/accuracy, else reward",
        ),
    ] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="The lowest value is the best.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the runs and list them; train none.")
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Train a grid of runs: every combination of the given values, each in its own process and folder.

    A comma separates values, except within brackets or quotes. Every run is
    checked before the first run starts. If a run fails, the others continue.
    The output of each run is in NAME.log beside its folder.

    To continue an interrupted sweep, repeat the command: it skips finished runs
    and resumes runs that have a checkpoint.

    In MLflow the runs are children of one run with the grid and the results.

    \b
    Examples:
      grpox sweep quickstart train.learning_rate=1e-4,2e-4,5e-4
      grpox sweep run.yaml loss=grpo,dapo train.beta=0,0.04 --seeds 0,1,2
      grpox sweep run.yaml 'loss={name: dapo, clip_high: 0.3},grpo'
      grpox sweep run.yaml --seeds 0,1,2 --parallel 3 --metric reward
    """
    from grpox.cli.sweep_grid import plan_trials, read_grid
    from grpox.cli.sweep_run import Sweep

    follow_log_options(log_level)
    if launch.world_size() > 1:
        what = "must be started as one process: it starts the processes of its runs"
        raise ConfigError(what, "grpox sweep", allowed="no launcher; --nproc-per-node P for P ranks per run")
    grid = read_grid(overrides or (), seeds)
    folder, trials = plan_trials(run, grid, folder, nproc_per_node)
    config = trials[0].config
    if metric is None and config.checkpoint.best is not None:
        metric, lowest = config.checkpoint.best, lowest or config.checkpoint.best_is in ("lowest", "min")
    planned = Sweep(run, grid, folder, trials, nproc_per_node, metric or config.main_metric, lowest)
    if dry_run:
        planned.show()
    else:
        planned.run_all(parallel)
