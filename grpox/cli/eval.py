"""`grpox eval`: evaluates a model on the held-out prompts of a run file, without training."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import LogFile, LogLevel, Overrides, follow_log_options, split_run, tell_warnings
from grpox.errors import ConfigError, RunFailed
from grpox.errors.console import Console
from grpox.errors.formatting import duration, pluralize
from grpox.errors.redaction import redacted
from grpox.runtime import launch
from grpox.runtime.files import without_nan, write_atomically, write_error_message

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun
    from grpox.training.evaluation import Evaluated


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, hub id, run folder or checkpoint.",
            show_default=False,
        ),
    ],
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="A run file or recipe with an `evaluation` section.",
            show_default="the run's own, if MODEL is of a run",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.json", help="Write the results as JSON.")
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option("--completions", metavar="FILE.parquet", help="Write every completion with its scores."),
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(
            metavar="YYYY-MM-DD",
            help="Date that a chat template writes, as model.chat_date=YYYY-MM-DD.",
            show_default="that of MODEL's run, else today",
        ),
    ] = None,
    log_level: LogLevel = "info",
    log_file: LogFile = None,
) -> None:
    """Evaluate a model on the held-out prompts of a run file, without training.

    Prompts, rewards, sampling and generator come from the run file's evaluation;
    its training settings are ignored. Under torchrun each rank takes a share of
    the prompts, and the results are the same as with one rank.

    \b
    Examples:
      grpox eval runs/quickstart       its last model, with its own config
      grpox eval runs/quickstart/model quickstart
      grpox eval runs/mine run.yaml --out figures.json
      grpox eval runs/mine/checkpoints/step-00000100 run.yaml
      grpox eval org/name run.yaml generator=vllm-colocate
      grpox eval my-model run.yaml evaluation.temperature=0.8 \\
          evaluation.num_generations=8 'evaluation.pass_at_k=[1, 4, 8]'
      torchrun --nproc-per-node 2 -m grpox eval my-model run.yaml
    """
    from grpox.training.load_evaluation import last_model, load_evaluation, named_model, own_config

    follow_log_options(log_level, log_file)
    for option, path in (("--out", out), ("--completions", completions)):
        if path is None:
            continue
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            with TemporaryFile(dir=next(each for each in path.absolute().parents if each.exists())):
                pass
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", option, given=str(path)) from error
    config, changes = split_run(config, overrides or ())
    changes += [] if date is None else [f"model.chat_date={json.dumps(date)}"]
    if config is None:
        config, model = own_config(model), last_model(model)
    named = named_model(model)
    run = load_evaluation(named, config, changes)
    tell_warnings(run.registry.plugins)
    result, seconds = _evaluate(run, named.checkpoint, Console(stderr=True))
    if launch.rank() != 0:
        return
    console = Console()
    table = Table(title="evaluation", title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for name, value in result.metrics.items():
        table.add_row(Text(name), f"{value:.4g}" if math.isfinite(value) else str(value))
    console.print(table)
    assert run.config.evaluation is not None
    paths, samples = run.config.evaluation.set_paths.values(), len(result.completions) // result.prompts
    about = f"{model}: {pluralize(result.prompts, 'prompt')} of {', '.join(paths)}"
    about += f", {samples} completions of each" if samples > 1 else ""
    about += f", on {pluralize(launch.world_size(), 'rank')} in {duration(seconds)}"
    console.print(about, markup=False, highlight=False, soft_wrap=True)
    if completions is not None:
        from grpox.observing.record_files import write_completions

        _write("completions", completions, lambda: write_completions(completions, 0, result.completions))
    if out is not None:
        figures = _figures(model, run, result, seconds)
        text = json.dumps(without_nan(figures), indent=2, ensure_ascii=False, allow_nan=False)
        _write("figures", out, lambda: write_atomically(out, f"{text}\n"))


def _evaluate(run: ResolvedRun, checkpoint: Path | None, console: Console) -> tuple[Evaluated, float]:
    """Evaluate with a progress bar on a terminal; return the result and the seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shows = console.is_terminal and launch.rank() == 0
    with Progress(*columns, console=console, transient=True, disable=not shows) as bar:
        task = bar.add_task("loading", total=None)
        # Imported here because it imports torch: mistakes in the command line are reported before.
        from grpox.training.evaluation import evaluate_model

        start = time.perf_counter()
        progress = partial(bar.update, task, description="prompts")
        result = evaluate_model(run, checkpoint, lambda done, total: progress(completed=done, total=total))
        return result, time.perf_counter() - start


def _figures(model: str, run: ResolvedRun, result: Evaluated, seconds: float) -> dict[str, Any]:
    """Collect the content of the file of ``--out``."""
    from grpox.config import labels_of
    from grpox.config.run import rewards_of
    from grpox.config.sampling import sampling_of
    from grpox.observing.record import git_commit, versions

    config = run.config
    assert config.evaluation is not None
    dumped = redacted(config.model_dump(mode="json"))
    return {
        "model": model,
        "config": run.source,
        "metrics": result.metrics,
        "prompts": result.prompts,
        "completions": len(result.completions),
        "rewards": labels_of(rewards_of(config)),
        "evaluation": dumped["evaluation"],
        "sampling": redacted(sampling_of(config.evaluation, config.sampling).model_dump(mode="json")),
        "generator": dumped["generator"],
        "model_config": dumped["model"],
        "seed": config.train.seed,
        "ranks": launch.world_size(),
        "seconds": seconds,
        "versions": versions(run.distributions),
        "git_commit": git_commit(),
    }


def _write(what: str, path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise RunFailed(write_error_message(error, path)) from error
    typer.echo(f"{what}: {path}")
