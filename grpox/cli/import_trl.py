"""`grpox import-trl`: converts a script or YAML file for TRL's GRPO to a run file."""

from __future__ import annotations

from collections import Counter
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpox.errors import ConfigError, plain

if TYPE_CHECKING:
    from rich.table import Table

    from grpox.runfile.from_trl.draft import Draft
    from grpox.runfile.from_trl.setup import Setup

LONGEST = 2**20
"""Longest script in characters; parsing it takes seconds."""
_STYLES = {
    "same": "green",
    "differs": "yellow",
    "not needed": "dim",
    "not supported": "bold red",
    "not a literal": "bold yellow",
    "unknown": "bold red",
}


def import_trl(
    setup: Annotated[
        Path, typer.Argument(metavar="SCRIPT_OR_YAML", help="A Python script, or a YAML file for `trl grpo`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="Run file to write.", show_default="standard output"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite RUN if it exists.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the outcomes as JSON; only --out writes the run file then.")
    ] = False,
) -> None:
    """Convert a script or YAML file for TRL's GRPOTrainer to a run file, without running it.

    A table gives the result for each field: the same, different, not needed,
    not supported. Where TRL's default differs from grpox's, the run file contains
    TRL's value, so the algorithm stays the same. Values that could not be read
    become commented lines. Statements of a script that change model, tokenizer,
    data or trainer, and that no run file holds, are listed with their lines.

    \b
    Examples:
      grpox import-trl train_grpo.py > run.yaml
      grpox import-trl grpo_config.yaml --out run.yaml
      grpox validate run.yaml
    """
    from grpox.errors.console import Console
    from grpox.errors.formatting import pluralize
    from grpox.runfile.from_trl.convert import convert
    from grpox.runfile.from_trl.draft import STATEMENT, run_file_text
    from grpox.runtime.files import write_atomically, write_error_message

    if out is not None and out.exists() and not force:
        allowed = "another file, or --force to overwrite it"
        raise ConfigError("exists already", key="--out", given=str(out), allowed=allowed)
    draft = convert(_read(setup), out.parent if out is not None else Path())
    text = run_file_text(draft)
    console = Console(stderr=True)
    console.print(_table(draft))
    outcomes = draft.outcomes()
    lost = Counter(STATEMENT if row.name == STATEMENT else "field" for row in draft.rows if row.is_lost)
    parts = [f"{len(draft.blanks)} to fill in, as commented lines"] if draft.blanks else []
    parts += [f"{pluralize(count, kind)} not carried over" for kind, count in lost.items()]
    parts = parts or (
        ["some to convert by hand"] if outcomes["not_carried"] else ["everything was carried over"]
    )
    message = "; ".join(parts)
    console.print(f"{message}. Next: grpox validate {out or 'RUN'}", highlight=False)
    if json:
        typer.echo(dumps(outcomes, indent=2))
    elif out is None:
        typer.echo(text, nl=False)
    if out is None:
        return
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ConfigError(write_error_message(error, out), key="--out", given=str(out)) from error


def _read(path: Path) -> Setup:
    """Read a TRL setup from a file; the file's ending gives the format."""
    from grpox.runfile.from_trl.script import read_script
    from grpox.runfile.from_trl.setup import read_trl_yaml
    from grpox.runfile.yaml_lines import read_text

    if path.suffix not in (".py", ".yaml", ".yml"):
        what = "is neither a Python script nor a YAML file"
        raise ConfigError(what, given=str(path), allowed="a name that ends in .py, .yaml or .yml")
    text = read_text(path, str(path), LONGEST + 1)
    if len(text) > LONGEST:
        raise ConfigError(f"is longer than {LONGEST} characters", where=str(path))
    return read_script(text, path, str(path)) if path.suffix == ".py" else read_trl_yaml(text, str(path))


def _table(draft: Draft) -> Table:
    """Build the table of outcomes, a row for each setting."""
    from rich.text import Text

    from grpox.errors.console import folding_table

    table = folding_table("line", "TRL", "given", "", "run file")
    for row in draft.rows:
        name, given = Text(plain(row.name, 80)), Text(plain(row.given.shown, 80), "dim")
        verdict = Text(row.verdict.value, _STYLES[row.verdict.value])
        table.add_row(str(row.given.line or ""), name, given, verdict, Text(plain(row.message, 400)))
    return table
