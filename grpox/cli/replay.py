"""`grpox replay`: repeats a step whose loss or gradient was NaN or infinite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import LogFile, LogLevel, follow_log_options
from grpox.errors.console import Console

if TYPE_CHECKING:
    from grpox.training.replay import Replay, Replayed
    from grpox.update.nonfinite import NonFinite

AROUND = 6
"""Number of tokens of a completion shown on each side of a token."""
MOST_LISTED = 8
"""Largest number of tokens, and of parameters, that are listed."""


def replay(
    dump: Annotated[
        Path, typer.Argument(metavar="DUMP", help="The saved step: OUTPUT_DIR/faults/step-00000012.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Overrides to try: loss, correction, train.beta, train.kl, ..."
        ),
    ] = None,
    log_level: LogLevel = "info",
    log_file: LogFile = None,
) -> None:
    """Repeat a step whose loss or gradient was NaN or infinite, and show the first such token.

    A run saves the batch of such a step, with the weights before the step. This
    command repeats forward, loss and backward in one process. It shows each
    micro-batch and, for each term of the loss, the first token whose value is
    NaN or infinite, with the text around it.

    The exit code is 0 if the fault appears again and 1 if not. If it does not
    appear with overrides, the overrides solve it. If it does not appear without
    overrides, suspect the hardware, or a difference between one rank and several.

    \b
    Examples:
      grpox replay runs/mine/faults/step-00000012
      grpox replay runs/mine/faults/step-00000012 train.kl=k2
      grpox replay runs/mine/faults/step-00000012 loss=cispo
    """
    from grpox.training.replay import open_dump
    from grpox.training.replay import replay as compute

    follow_log_options(log_level, log_file)
    fault = open_dump(dump)
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"in the run: {fault.what} in step {fault.step}")
    for each in fault.found[:MOST_LISTED]:
        say(f"    {each}")
    result = compute(dump, fault, overrides or ())
    console.print(_micro_batches(result))
    if result.nonfinite:
        console.print(_places(result))
    if parameters := next((each.parameters for each in result.micro_batches if each.parameters), ()):
        more = f" and {len(parameters) - MOST_LISTED} more" if len(parameters) > MOST_LISTED else ""
        say(f"gradients with NaN or infinity: {', '.join(parameters[:MOST_LISTED])}{more}")
    numbers = f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}"
    if result.finite:
        say(f"{'solved' if overrides else 'does not appear again'}: {numbers}")
        raise typer.Exit(1)
    say(f"appears again: {numbers}")


def _micro_batches(result: Replay) -> Table:
    table = Table(title="micro-batches", title_justify="left")
    for name in ("rank", "micro-batch", "rows", "tokens", "loss", "gradient norm", "finite"):
        table.add_column(name, justify="right")
    for each in result.micro_batches:
        mask = each.batch.token_mask
        counts = map(str, (each.rank, each.place, mask.shape[0], int(mask.sum())))
        table.add_row(*counts, f"{each.loss:.6g}", f"{each.grad_norm:.6g}", "yes" if each.finite else "NO")
    return table


def _places(result: Replay) -> Table:
    """Draw the first token with NaN or infinity for each term: all its numbers, and the text around it."""
    table = Table(title="first token with NaN or infinity, by term", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fault in result.nonfinite[:MOST_LISTED]:
        where = (fault.rank, fault.micro_batch)
        micro_batch = next(each for each in result.micro_batches if (each.rank, each.place) == where)
        table.add_row(f"{fault.term} {fault.value}", fault.where, style="bold")
        terms = {name: float(values[fault.row, fault.token]) for name, values in micro_batch.terms.items()}
        difference = terms["log-probability"] - terms["old log-probability"]
        terms["ratio"] = math.exp(difference) if difference < 700 else math.inf
        for name, value in terms.items():
            table.add_row(f"  {name}", f"{value:.6g}")
        table.add_row("  text", Text(_text(result, micro_batch, fault)), end_section=True)
    return table


def _text(result: Replay, micro_batch: Replayed, fault: NonFinite) -> str:
    """Decode the completion around a token; marks enclose the token."""
    ids = micro_batch.batch.samples[fault.row].completion
    begin, end = max(fault.token - AROUND, 0), fault.token + 1 + AROUND
    parts = (ids[begin : fault.token], ids[fault.token : fault.token + 1], ids[fault.token + 1 : end])
    before, token, after = (result.tokenizer.decode(part) for part in parts)
    cut = ("... " if begin else ""), (" ..." if end < len(ids) else "")
    return f"{cut[0]}{before} >>>{token}<<< {after}{cut[1]}"
