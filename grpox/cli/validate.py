"""`grpox validate` checks a run file and lists its components; `grpox schema` prints the JSON schema."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpox.cli.arguments import Overrides, Ranks, Run, discovered, load_named_run, warn
from grpox.errors.console import Console
from grpox.errors.formatting import pluralize
from grpox.errors.redaction import redacted
from grpox.plugins.registry import Registry
from grpox.runfile.environments import bound_tools
from grpox.runfile.load import ResolvedRun
from grpox.runfile.schema import run_schema


def validate(
    run: Run,
    overrides: Overrides = None,
    world_size: Ranks = None,
    rows: Annotated[
        int | None,
        typer.Option("--rows", min=1, metavar="N", help="Rows of each dataset to check.", show_default="all"),
    ] = None,
) -> None:
    """Check a run file: keys, types, plugins, files, columns, rows, lengths, batches. Loads no model.

    The command lists every problem with its line; the exit code is then 2.
    The rows are checked as at the start of training, with the model's tokenizer.

    \b
    Examples:
      grpox validate run.yaml
      grpox validate run.yaml train.num_generations=16 --world-size 8
    """
    console, resolved = Console(), load_named_run(run, overrides, world_size)
    # Imported here because it imports torch: mistakes in the run file are reported before.
    from grpox.runtime.setup import quieten
    from grpox.training.inputs import check_rows

    quieten()
    for unchecked in check_rows(replace(resolved, most_rows=rows)):
        warn(unchecked)
    console.print(validate_report(resolved))


def validate_report(run: ResolvedRun) -> RenderableType:
    """Draw the components with their parameters and distributions, and the batch arithmetic in one line."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "component"):
        # Long values are folded, because an ellipsis would hide them.
        table.add_column(heading, overflow="fold")
    for key, bound in run.components.items():
        origin = bound.offer.origin if bound.offer else "the run file's path"
        label = f"{bound.label}  {origin}"
        values = redacted(bound.config.model_dump()) if bound.config is not None else {}
        parameters = ", ".join(f"{name}={_value(value)}" for name, value in values.items())
        table.add_row(Text(key), Text(f"{label}\n").append(parameters, "dim") if parameters else Text(label))
    for place, each in enumerate(bound_tools(run)):
        table.add_row(Text(f"tools[{place}]"), Text(f"{each.name}  {each.reference}"))
    plan = run.plan
    arithmetic = (
        f"ranks: {plan.world_size}; generation batch: {pluralize(plan.prompts_per_generation, 'prompt')} x "
        f"{pluralize(plan.num_generations, 'completion')} = {plan.generation_batch_size}; "
        f"samples per optimizer step: {plan.train_batch_size}; "
        f"optimizer steps per generation batch: {plan.optimizer_steps_per_generation}"
    )
    return Group(Text.assemble(("OK ", "bold green"), run.source), table, Text(arithmetic))


def _value(value: object) -> str:
    """Write a value as in a run file: ``null`` and ``true`` instead of ``None`` and ``True``."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def schema() -> None:
    """Print the JSON schema of run files, including the parameters of every installed component.

    \b
    With the schema, an editor completes and checks run files as you type.
    With the YAML language server, write the schema to a file:
      grpox schema > grpox.schema.json
    and name that file in the first line of run.yaml:
      # yaml-language-server: $schema=grpox.schema.json
    """
    typer.echo(json.dumps(run_schema(Registry(discovered())), indent=2))
