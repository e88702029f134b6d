"""`grpox export` writes a checkpoint as a Hugging Face folder; `grpox report` writes a run's report again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from grpox.cli.arguments import warn
from grpox.errors import ConfigError
from grpox.errors.console import Console


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or a run's folder, whose newest intact checkpoint is exported.",
            show_default=False,
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder for the model; new or empty.")],
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the model's own code, as the run did."),
    ] = False,
) -> None:
    """Export a checkpoint as a plain Hugging Face model folder with the trained weights.

    The folder holds config, safetensors, tokenizer and generation config, like
    the model of a finished run. The command first compares the checkpoint's files
    with its manifest. One process is enough for any number of ranks. The process
    needs memory for the model, and the run's model folder (model.path), from
    which it copies config and tokenizer.

    \b
    Examples:
      grpox export runs/mine my-model
      grpox export runs/mine/checkpoints/step-00000100 my-model
    and then in Python:
      transformers.AutoModelForCausalLM.from_pretrained("my-model")
    """
    with Console(stderr=True).status("reading the checkpoint"), _file_errors_as_config_errors(out_dir):
        # Imported here, because it imports torch.
        from grpox.checkpoint.export import export_checkpoint

        exported = export_checkpoint(checkpoint, out_dir, trust_remote_code)
    typer.echo(f"{out_dir}: the model of {exported}")


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder (its output_dir).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File to write.", show_default="RUN_DIR/report.html"),
    ] = None,
) -> None:
    """Write a run's report again: curves, completions, config and versions on one HTML page.

    Every run writes its report when it ends. This command writes one from the
    files that are in the folder now, so it also shows a run that is still
    training or was killed. The page needs no network.

    \b
    Examples:
      grpox report runs/quickstart
      grpox report runs/quickstart --output quick.html
    """
    from grpox.observing.page.report import write_report
    from grpox.runtime.files import readable

    with _file_errors_as_config_errors(run_dir):
        if output is not None and output.is_dir():
            raise ConfigError("is a folder: name a file", key="--output", given=str(output))
        typer.echo(readable(write_report(run_dir, output, warn)))


@contextmanager
def _file_errors_as_config_errors(path: Path) -> Iterator[None]:
    """Raise a ConfigError for a file that cannot be read or written."""
    try:
        yield
    except OSError as error:
        what = f"cannot be read or written: {error.strerror or error}"
        raise ConfigError(what, given=str(error.filename or path)) from error
