"""`grpox validate`: what a run that checks out is made of."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpox.component import BoundComponent
from grpox.runfile import ResolvedRun


def validate_report(run: ResolvedRun) -> RenderableType:
    """The components with their parameters and distributions, and the batch arithmetic in one line."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "component", "from", "parameters"):
        table.add_column(heading)
    for key, bound in run.components.items():
        table.add_row(key, bound.label, _origin(bound), _parameters(bound))
    plan = run.plan
    ranks = "rank" if plan.world_size == 1 else "ranks"
    arithmetic = (
        f"on {plan.world_size} {ranks}: {plan.prompts_per_generation} prompts x {plan.num_generations} completions"
        f" = {plan.generation_batch_size} per generation batch, {plan.train_batch_size} samples per optimizer step,"
        f" {plan.optimizer_steps_per_generation} optimizer steps per generation batch"
    )
    return Group(Text.assemble(("OK ", "bold green"), run.source), table, Text(arithmetic))


def _origin(bound: BoundComponent) -> str:
    return f"{bound.offer.distribution} {bound.offer.version}" if bound.offer else "the run file's path"


def _parameters(bound: BoundComponent) -> Text:
    values = bound.config.model_dump() if bound.config is not None else {}
    return Text(", ".join(f"{name}={value}" for name, value in values.items()), "dim")
