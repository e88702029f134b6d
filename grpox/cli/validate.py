"""`grpox validate`: checks a run file, and lists what the run is made of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from grpox.cli.arguments import Overrides, Ranks, Run, load_named_run
from grpox.cli.plugins import NARROW

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from grpox.plugins.component import BoundComponent
    from grpox.runfile.load import ResolvedRun


def validate(run: Run, overrides: Overrides = None, world_size: Ranks = None) -> None:
    """Check a run file: keys, types, plugins, files and batch sizes. Loads no model, takes under a second.

    Every problem is told at once, with its line; the exit code is then 2.

    \b
    Examples:
      grpox validate run.yaml
      grpox validate run.yaml train.num_generations=16 --world-size 8
    """
    from rich.console import Console

    console = Console()
    console.print(validate_report(load_named_run(run, overrides, world_size), narrow=console.width < NARROW))


def validate_report(run: ResolvedRun, narrow: bool = False) -> RenderableType:
    """The components with their parameters and distributions, and the batch arithmetic in one line.

    Args:
        narrow: write parameters below their component, for a terminal too narrow for them beside it.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from grpox.errors.formatting import counted

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "component") if narrow else ("", "component", "from", "parameters"):
        # Folded: an ellipsis would hide values.
        table.add_column(heading, overflow="fold")
    for key, bound in run.components.items():
        cells = Text(bound.label), Text(_origin(bound)), Text(_parameters(bound), "dim")
        table.add_row(Text(key), *([_stacked(*cells)] if narrow else cells))
    plan = run.plan
    arithmetic = (
        f"ranks: {plan.world_size}; generation batch: {counted(plan.prompts_per_generation, 'prompt')} x "
        f"{counted(plan.num_generations, 'completion')} = {plan.generation_batch_size}; "
        f"samples per optimizer step: {plan.train_batch_size}; "
        f"optimizer steps per generation batch: {plan.optimizer_steps_per_generation}"
    )
    return Group(Text.assemble(("OK ", "bold green"), run.source), table, Text(arithmetic))


def _stacked(label: Text, origin: Text, parameters: Text) -> Text:
    from rich.text import Text

    return Text("\n").join([Text("  ").join([label, origin]), *([parameters] if parameters else [])])


def _origin(bound: BoundComponent) -> str:
    return f"{bound.offer.distribution} {bound.offer.version}" if bound.offer else "the run file's path"


def _parameters(bound: BoundComponent) -> str:
    from grpox.errors.redaction import redacted

    values = redacted(bound.config.model_dump()) if bound.config is not None else {}
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: object) -> str:
    """As a run file may have it: ``null`` and ``true`` rather than Python's words for them."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
