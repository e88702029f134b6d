"""`grpox init`: asks for model, data and reward, and writes a run file that `grpox validate` accepts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from grpox.cli.init_files import EXAMPLE, OWN, Draft, data_files
from grpox.errors import ConfigError, Problem

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
    draft = Draft(folder)
    draft.refuse_existing("run.yaml")
    answers = _Answers(yes)
    draft.model = answers.to("Model: a folder or hub id", model, DEFAULT_MODEL, draft.check_model)
    files = data_files(folder)
    text = f"Data: a .jsonl, .json, .csv or .parquet file, or a hub id; {EXAMPLE}: sums"
    draft.data = answers.to(text, data, files[0] if files else EXAMPLE, draft.check_data)
    columns = draft.columns
    if prompt_column is not None or (columns and "prompt" not in columns):
        text = f"Column with the prompts: {', '.join(columns)}"
        default = columns[0] if columns else "prompt"
        draft.prompt_column = answers.to(text, prompt_column, default, draft.check_prompt_column)
    if draft.is_plain:
        text = "The prompts are plain text: apply the model's chat template to them, yes or no"
        option, wrong = "yes" if model and data and reward else None, [Problem("is not yes or no")]
        draft.chat = answers.to(text, option, "yes", lambda given: [] if given in ("yes", "no") else wrong)
    if answer_column is not None:
        answers.to("", answer_column, "", draft.check_answer_column)
    draft.answer_column = answer_column or draft.likely_answer
    text = f"Reward: a name, FILE.py:FUNCTION; {OWN}: a function to write"
    draft.reward = answers.to(text, reward, OWN, draft.check_reward)
    for path in draft.write():
        typer.echo(path)
    run_file = shlex.quote(str(draft.run_file))
    typer.echo(f"next: grpox validate {run_file}\n      grpox train {run_file}")


class _Answers:
    """Answers of the user: an option, the default, or what is typed until it is right."""

    def __init__(self, takes_defaults: bool) -> None:
        self._takes_defaults = takes_defaults

    def to(
        self, question: str, option: str | None, default: str, check: Callable[[str], Sequence[Problem]]
    ) -> str:
        """Return the answer to a question.

        Args:
            option: what the command line says; then nothing is asked.
            check: finds the problems with an answer.

        Raises:
            ConfigError: the option or the default is wrong, or there is no terminal to ask.
        """
        given = default if option is None and self._takes_defaults else option
        while True:
            answer = _typed(question, default) if given is None else given
            problems = list(check(answer))
            if not problems:
                return answer
            if given is not None:
                raise ConfigError(problems)
            typer.secho(f"error: {ConfigError(problems)}", err=True)


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
