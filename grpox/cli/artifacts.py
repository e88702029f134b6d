"""`grpox export` and `grpox report`: a checkpoint as a plain Hugging Face folder, and a run's report again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grpox.errors import ConfigError


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or a run's folder: its newest good one.",
            show_default=False,
        ),
    ],
    out_dir: Annotated[
        Path, typer.Argument(metavar="OUT_DIR", help="Where the model is to be: a new or empty folder.")
    ],
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the code that comes with the model, as the run did."),
    ] = False,
) -> None:
    """Make a model of a checkpoint: a plain Hugging Face folder with the weights as they were trained.

    It holds config, safetensors, tokenizer and generation config, as the model
    of a finished run does. The checkpoint's files are compared with its manifest
    first. One process is enough, whatever the number of ranks was; it needs memory
    for the model, and the run's own model folder (model.path), where the rest is from.

    \b
    Examples:
      grpox export runs/mine my-model
      grpox export runs/mine/checkpoints/step-00000100 my-model
    and then in Python:
      transformers.AutoModelForCausalLM.from_pretrained("my-model")
    """
    with Console(stderr=True).status("reading the checkpoint"), _file_errors_as_config_errors(out_dir):
        # Only now, because it imports torch.
        from grpox.checkpoint.export import export_checkpoint

        exported = export_checkpoint(checkpoint, out_dir, trust_remote_code)
    typer.echo(f"{out_dir}: the model of {exported}")


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

    with _file_errors_as_config_errors(run_dir):
        if output is not None and output.is_dir():
            raise ConfigError("is a folder: give a file", key="--output", given=str(output))
        typer.echo(write_report(run_dir, output))


@contextmanager
def _file_errors_as_config_errors(path: Path) -> Iterator[None]:
    """Raise a ConfigError for a file that cannot be read or written."""
    try:
        yield
    except OSError as error:
        what = f"cannot be read or written: {error.strerror or error}"
        raise ConfigError(what, given=str(error.filename or path)) from error
