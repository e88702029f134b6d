"""`grpox init`: asks for model, data and reward, and writes a run file that `grpox validate` accepts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from grpox.cli.init_files import ANSWERS, EXAMPLE, OWN, RunDraft
from grpox.data.open_data import DATA_FILES
from grpox.errors import ConfigError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write to; created if missing.")
    ] = Path(),
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model's folder or hub id.", show_default=DEFAULT_MODEL),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help=f"A file of prompts or a hub id; {EXAMPLE}: write a file of sums.",
            show_default=f"the file in FOLDER, else {EXAMPLE}",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="REWARD",
            help=f"A reward's name, FILE.py:FUNCTION, or {{name: ..., KEY: ...}}; {OWN}: write a function.",
            show_default=OWN,
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column with the prompts.", show_default="prompt"),
    ] = None,
    answer_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Column with the right answers.", show_default="answer, solution, ..."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults.")] = False,
) -> None:
    """Write a run file: ask for model, data and reward, and check each answer at once.

    The command writes run.yaml, and where you want them rewards.py with a reward
    function and sums.jsonl with example data. It overwrites nothing.

    \b
    Examples:
      grpox init
      grpox init adding --yes
      grpox init adding --model ./my-model --data sums.jsonl --reward exact
      grpox init --data train.jsonl --reward rewards.py:is_short --yes
    """
    draft = RunDraft(folder)
    draft.refuse_existing("run.yaml")

    def ask(name: str, question: str, option: str | None, default: str) -> None:
        """Set an answer: the option, the default with --yes, or what is typed until it is right."""
        given = default if option is None and yes else option
        while True:
            answer = _typed(question, default) if given is None else given
            try:
                return draft.set(name, answer)
            except ConfigError as error:
                if given is not None:
                    raise
                typer.secho(f"error: {error}", err=True)

    ask("model", "Model: a folder or hub id", model, DEFAULT_MODEL)
    files = sorted(str(path) for path in folder.glob("*") if path.suffix in DATA_FILES and path.is_file())
    question = f"Data: a .jsonl, .json, .csv or .parquet file, or a hub id; {EXAMPLE}: sums"
    ask("data", question, data, files[0] if files else EXAMPLE)
    columns = draft.columns
    if prompt_column is not None or (columns and "prompt" not in columns):
        question = f"Column with the prompts: {', '.join(columns)}"
        ask("prompt_column", question, prompt_column, columns[0] if columns else "prompt")
    if draft.is_plain:
        question = "The prompts are plain text: apply the model's chat template to them, yes or no"
        ask("chat", question, "yes" if model and data and reward else None, "yes")
    likely = next((name for name in ANSWERS if name in columns), "")
    draft.set("answer_column", answer_column or likely)
    ask("reward", f"Reward: a name, FILE.py:FUNCTION; {OWN}: a function to write", reward, OWN)
    for path in draft.write():
        typer.echo(path)
    run_file = shlex.quote(str(draft.run_file))
    typer.echo(f"next: grpox validate {run_file}\n      grpox train {run_file}")


def _typed(question: str, default: str) -> str:
    try:
        return str(typer.prompt(question, default=default)).strip()
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None  # Ctrl-C ends with 130, as in every command
        if sys.stdin.isatty():
            raise  # Ctrl-D
        allowed = "--model, --data and --reward; --yes takes the defaults"
        raise ConfigError("there is nobody to ask: standard input has ended", allowed=allowed) from None
