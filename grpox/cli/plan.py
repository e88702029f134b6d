"""`grpox plan`: how batches flow, or how much memory a rank takes."""

from __future__ import annotations

from typing import Annotated

import typer

from grpox.cli.arguments import Overrides, Ranks, Run, load_named_run


def plan(
    run: Run,
    overrides: Overrides = None,
    world_size: Ranks = None,
    generations: Annotated[
        int, typer.Option("--generations", min=1, metavar="N", help="Generation batches to draw.")
    ] = 2,
    memory: Annotated[
        bool, typer.Option("--memory", help="How much memory a rank takes, in place of the drawing.")
    ] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --memory: tokens of the longest prompt.",
            show_default="data.max_prompt_length, else 512",
        ),
    ] = None,
) -> None:
    """Draw how batches flow: which prompts each rank trains on, and when an optimizer step is taken.

    With --memory: how much each rank takes, of its GPU and of the host.
    It is computed from the model's config.json alone, without its weights.

    \b
    Examples:
      grpox plan run.yaml
      grpox plan run.yaml --world-size 2 --generations 3
      grpox plan run.yaml train.gradient_accumulation_steps=4
      grpox plan run.yaml --memory --world-size 32
    """
    from rich.console import Console

    from grpox.cli.plan_report import plan_report

    resolved, console = load_named_run(run, overrides, world_size), Console()
    if memory:
        from grpox.cli.memory_report import memory_report
        from grpox.policy.memory_plan.of_run import run_setting

        setting = run_setting(resolved, gpu=True, prompt_tokens=prompt_tokens)
        assumed = prompt_tokens is None and resolved.config.data.max_prompt_length is None
        console.print(memory_report(setting, assumed))
        return
    train = resolved.config.train
    console.print(plan_report(train, resolved.plan, resolved.num_prompts, generations, console))
