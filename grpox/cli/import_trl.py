"""`grpox import-trl`: converts a script or YAML file for TRL's GRPO to a run file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpox.cli.arguments import NARROW
from grpox.errors import ConfigError, plain

if TYPE_CHECKING:
    from rich.table import Table

    from grpox.runfile.from_trl.draft import Draft
    from grpox.runfile.from_trl.setup import Setup

LONGEST = 2**20
"""Characters of a script: parsing this many takes seconds."""
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
        typer.Option(
            "--out", metavar="RUN", help="Where to write the run file.", show_default="standard output"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite RUN if it is there.")] = False,
) -> None:
    """Make a run file of a set-up for TRL's GRPOTrainer. The script is parsed, never run.

    A table says what became of each field: the same, different, not needed,
    not supported. TRL's defaults that are not grpox's are written out, so that
    the run is the same algorithm. What could not be read is a commented line.

    \b
    Examples:
      grpox import-trl train_grpo.py > run.yaml
      grpox import-trl grpo_config.yaml --out run.yaml
      grpox validate run.yaml
    """
    from rich.console import Console

    from grpox.errors.formatting import pluralize
    from grpox.runfile.from_trl.convert import convert
    from grpox.runfile.from_trl.draft import run_file_text
    from grpox.runtime.files import write_atomically, write_error_message

    if out is not None and out.exists() and not force:
        allowed = "another file, or --force to overwrite it"
        raise ConfigError("exists already", key="--out", given=str(out), allowed=allowed)
    draft = convert(_read(setup), out.parent if out is not None else Path())
    text = run_file_text(draft)
    console = Console(stderr=True)
    console.print(_table(draft, narrow=console.width < NARROW))
    lost = sum(row.is_lost for row in draft.rows)
    parts = [f"{len(draft.blanks)} to fill in, as commented lines"] if draft.blanks else []
    parts += [f"{pluralize(lost, 'field')} not carried over"] if lost else []
    message = "; ".join(parts) or "everything was carried over"
    console.print(f"{message}. Next: grpox validate {out or 'RUN'}", highlight=False)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ConfigError(write_error_message(error, out), key="--out", given=str(out)) from error


def _read(path: Path) -> Setup:
    """Read the set-up in a file, by its ending."""
    from grpox.runfile.from_trl.script import read_script
    from grpox.runfile.from_trl.setup import read_trl_yaml
    from grpox.runfile.yaml_lines import read_text

    if path.suffix not in (".py", ".yaml", ".yml"):
        what = "is neither a Python script nor a YAML file"
        raise ConfigError(what, given=str(path), allowed="a name that ends in .py, .yaml or .yml")
    text = read_text(path, str(path), LONGEST + 1)
    if len(text) > LONGEST:
        raise ConfigError(f"is too long: at most {LONGEST} characters are read", where=str(path))
    return read_script(text, path, str(path)) if path.suffix == ".py" else read_trl_yaml(text, str(path))


def _table(draft: Draft, narrow: bool) -> Table:
    """Build the table of outcomes, a row for each setting.

    Args:
        narrow: for a narrow terminal, write values below names and explanations below verdicts.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("line", "TRL", "run file") if narrow else ("line", "TRL", "given", "", "run file"):
        # Folded, as cut names could not be copied.
        table.add_column(heading, overflow="fold")
    for row in draft.rows:
        line = Text(str(row.given.line or ""))
        name, given = Text(plain(row.name, 80)), Text(plain(row.given.shown, 80), "dim")
        verdict = Text(row.verdict.value, _STYLES[row.verdict.value])
        message = Text(plain(row.message, 400))
        if narrow:
            table.add_row(line, Text("\n").join([name, given]), Text("\n").join([verdict, message]))
        else:
            table.add_row(line, name, given, verdict, message)
    return table
