"""`grpox validate`: what a run that checks out is made of."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpox.component import BoundComponent
from grpox.runfile.load import ResolvedRun


def validate_report(run: ResolvedRun) -> RenderableType:
    """The components with their parameters and distributions, and the batch arithmetic in one line."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "component", "from", "parameters"):
        table.add_column(heading)
    for key, bound in run.components.items():
        table.add_row(key, bound.label, _origin(bound), _parameters(bound))
    plan = run.plan
    arithmetic = (
        f"ranks: {plan.world_size}; generation batch: {plan.prompts_per_generation} prompts x "
        f"{plan.num_generations} completions = {plan.generation_batch_size}; "
        f"samples per optimizer step: {plan.train_batch_size}; "
        f"optimizer steps per generation batch: {plan.optimizer_steps_per_generation}"
    )
    return Group(Text.assemble(("OK ", "bold green"), run.source), table, Text(arithmetic))


def _origin(bound: BoundComponent) -> str:
    return f"{bound.offer.distribution} {bound.offer.version}" if bound.offer else "the run file's path"


def _parameters(bound: BoundComponent) -> Text:
    values = bound.config.model_dump() if bound.config is not None else {}
    return Text(", ".join(f"{name}={value}" for name, value in values.items()), "dim")
