"""`grpox export`: a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpox.errors import ConfigError, Problem


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
    from rich.console import Console

    with Console(stderr=True).status("reading the checkpoint"):
        # Only now, because it imports torch.
        from grpox.checkpoint.export import export_checkpoint

        try:
            found = export_checkpoint(checkpoint, out_dir, trust_remote_code)
        except OSError as error:
            what = f"cannot be read or written: {error.strerror or error}"
            raise ConfigError(Problem(what, given=str(error.filename or out_dir))) from error
    typer.echo(f"{out_dir}: the model of {found}")
