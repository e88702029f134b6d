"""`grpox train`: trains the model of a run file."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from grpox.cli.arguments import (
    LogFile,
    LogLevel,
    Overrides,
    follow_log_options,
    load_named_run,
    split_run,
)
from grpox.cli.errors import Traceback
from grpox.cli.watch import watching
from grpox.errors import ConfigError, RankLost, nearest
from grpox.runfile.paths import unreachable
from grpox.runtime import launch
from grpox.runtime.logs import get_logger

logger = get_logger(__name__)

AUTO = "auto"
_CONFIG = "config.yaml"


def train(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run file, or the name of a recipe.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="DIR", help="Continue the run in DIR; auto: the run in RUN's output_dir."
        ),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume even if config, data or plugins have changed.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run on a page in the browser: see grpox watch.")
    ] = False,
    log_level: LogLevel = "info",
    log_file: LogFile = None,
    traceback: Traceback = False,
) -> None:
    """Train a model: check the run file, then repeat sampling, scoring and updating.

    \b
    Examples:
      grpox train quickstart
      grpox train run.yaml train.max_steps=10 output_dir=runs/try
      grpox train run.yaml loss=dr_grpo rewards.0.weight=2
      grpox train --resume runs/try          continue where the run stopped
      grpox train run.yaml --resume auto     the same, or begin a new run
      torchrun --nproc-per-node 8 -m grpox train run.yaml
    """
    began = time.time()
    follow_log_options(log_level, log_file)
    needs_checkpoint = False
    if resume is not None:
        needs_checkpoint = resume != AUTO
        run, overrides = run_to_resume(run, overrides or (), resume)
    if run is None:
        raise typer.BadParameter(
            "name a run file or recipe, or a run's folder with --resume", context, param_hint="RUN"
        )
    resolved = load_named_run(run, overrides)
    folder = Path(resolved.config.output_dir)
    if is_main := launch.rank_or_zero() == 0:
        logger.info("%s: checked; loading torch, transformers and DeepSpeed", run)
    try:
        with watching(folder) if watch and is_main else nullcontext():
            # Imported here because it imports torch: mistakes in the run file are reported before.
            import psutil

            from grpox.training.run import train_run

            started = psutil.Process().create_time()
            train_run(resolved, resume is not None, allow_changes, needs_checkpoint, started)
    except BaseException as error:
        from grpox.checkpoint.folders import checkpoints_in
        from grpox.runtime.run_lock import is_locked

        # Rank 0 speaks for all ranks, but it may be the one that died. A locked folder is another run's.
        if (is_main or isinstance(error, RankLost)) and not is_locked(folder):
            # Until this run begins, the folder may hold the files of an earlier one.
            saved = [path.stat().st_mtime >= began for path in checkpoints_in(folder)]
            if any(path.stat().st_mtime >= began for path in folder.glob("summary.json")):
                error.add_note(_places(folder))
            elif any(saved) or (saved and resume and not isinstance(error, ConfigError)):
                error.add_note(f"to go on: grpox train --resume {shlex.quote(str(folder))}")
        raise
    if is_main:
        typer.echo(_places(folder))


def _places(folder: Path) -> str:
    """Say where to look after a run."""
    report, quoted = folder / "report.html", shlex.quote(str(folder))
    pages = [str(report)] if report.exists() else []
    return "look at: " + "  or  ".join([*pages, f"grpox runs show {quoted}"])


def run_to_resume(run: str | None, overrides: Sequence[str], resume: str) -> tuple[str, list[str]]:
    """Choose the run file and overrides to load.

    Args:
        run: a run file or recipe; None or an override stands for the config in the run's folder.
        resume: a run's folder, or ``auto`` for the output_dir of `run`.

    Raises:
        ConfigError: the folder does not exist, or ``auto`` comes without a run file.
    """
    run, changes = split_run(run, overrides)
    if resume == AUTO:
        if run is None:
            allowed = "a run's folder, or RUN --resume auto"
            what = "needs a run file, whose output_dir is searched"
            raise ConfigError(what, "--resume", given=AUTO, allowed=allowed)
        return run, changes
    folder = Path(resume)
    if reason := unreachable(folder / _CONFIG):
        raise ConfigError(f"cannot be opened: {reason}", "--resume", given=resume)
    if not (folder / _CONFIG).is_file():
        what = "holds no run" if folder.is_dir() else "no such folder"
        runs = sorted(str(config.parent) for config in folder.parent.glob(f"*/{_CONFIG}"))
        near = nearest(resume, runs)
        raise ConfigError(
            what, "--resume", given=resume, allowed="a folder that a run has written", nearest=near
        )
    return run or str(folder / _CONFIG), [*changes, f"output_dir={folder}"]
