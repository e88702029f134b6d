"""The command line. What each command does is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from grpox import __version__
from grpox.cli import eval as cli_eval
from grpox.cli import export as cli_export
from grpox.cli import import_trl as cli_import_trl
from grpox.cli import plugins as cli_plugins
from grpox.cli import recipes as cli_recipes
from grpox.cli import replay as cli_replay
from grpox.cli import report as cli_report
from grpox.cli import runs as cli_runs
from grpox.cli import serve as cli_serve
from grpox.cli import sweep as cli_sweep
from grpox.cli import sync as cli_sync
from grpox.cli.doctor import command as cli_doctor
from grpox.cli.errors import TRACEBACK, PastTyper
from grpox.cli.plugins import NARROW

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


class _Commands(TyperGroup):
    """Keeps from typer what it would swallow: it makes 130 of a SIGTERM, and of a broken pipe a silent 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError, OSError) as error:
            raise PastTyper(error) from error


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False)

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run file (YAML), or the name of a recipe: grpox recipes list.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the run, for example train.max_steps=10 or loss.clip_high=0.28; values are YAML.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option("--world-size", min=1, metavar="P", help="Ranks to check for.", show_default="this launch's"),
]
Traceback = Annotated[
    bool, typer.Option(TRACEBACK, help="Show where an error was raised; every command takes it.")
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    traceback: Traceback = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """GRPO post-training in which every algorithmic part is a plugin, on DeepSpeed ZeRO-3.

    \b
    Start here:
      grpox train quickstart           a whole run in about a minute, on a CPU
      grpox recipes copy quickstart    its run file, to change
      grpox validate quickstart.yaml   check it: keys, plugins, files, batches
      grpox plugins list               losses, rewards, ... that can be named
    """
    # The deepspeed launcher passes --local_rank; the rank is read from the environment it also sets.
    if version:
        typer.echo(f"grpox {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def train(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run file, or the name of a recipe.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="DIR", help="Go on with the run in DIR; auto: in RUN's output_dir."),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume even with another config, data or plugins.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Train: check the run file, then sample, score and update until it is done.

    \b
    Examples:
      grpox train quickstart
      grpox train run.yaml train.max_steps=10 output_dir=runs/try
      grpox train run.yaml loss=dr_grpo rewards.0.weight=2
      grpox train --resume runs/try          go on where it stopped
      grpox train run.yaml --resume auto     or begin, where there is nothing yet
      torchrun --nproc-per-node 8 -m grpox train run.yaml
    """
    needs_checkpoint = False
    if resume is not None:
        from grpox.cli.resume import AUTO, run_to_resume

        needs_checkpoint = resume != AUTO
        run, overrides = run_to_resume(run, overrides or (), resume)
    if run is None:
        raise typer.BadParameter(
            "name a run file or recipe, or a run's folder by --resume", context, param_hint="RUN"
        )
    resolved = _load(run, overrides)
    # Only now, because it imports torch: a mistake in the run file is told at once.
    from grpox.training.run import train_run

    train_run(resolved, resume is not None, allow_changes, needs_checkpoint)


@app.command()
def validate(run: Run, overrides: Overrides = None, world_size: Ranks = None) -> None:
    """Check a run file: keys, types, plugins, files and batch sizes. Loads no model, takes under a second.

    Every problem is told at once, with its line; the exit code is then 2.

    \b
    Examples:
      grpox validate run.yaml
      grpox validate run.yaml train.num_generations=16 --world-size 8
    """
    from rich.console import Console

    from grpox.cli.validate_report import validate_report

    console = Console()
    console.print(validate_report(_load(run, overrides, world_size), narrow=console.width < NARROW))


@app.command()
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

    resolved, console = _load(run, overrides, world_size), Console()
    if memory:
        from grpox.cli.memory_report import memory_report
        from grpox.policy.memory_plan.of_run import run_setting

        setting = run_setting(resolved, gpu=True, prompt_tokens=prompt_tokens)
        assumed = prompt_tokens is None and resolved.config.data.max_prompt_length is None
        console.print(memory_report(setting, assumed))
        return
    train = resolved.config.train
    console.print(plan_report(train, resolved.plan, resolved.num_prompts, generations, console))


app.command("eval")(cli_eval.evaluate)
app.command("export")(cli_export.export)
app.command("import-trl")(cli_import_trl.import_trl)
app.command("report")(cli_report.report)
app.command("replay")(cli_replay.replay)
app.command("sweep")(cli_sweep.sweep)
app.command("sync")(cli_sync.sync)
app.command("doctor")(cli_doctor.doctor)
app.command("serve")(cli_serve.serve)


@app.command()
def schema() -> None:
    """Print the run file's JSON schema, the parameters of every installed component included.

    \b
    An editor that knows it completes and checks run files as you type.
    With the YAML language server, write the schema to a file:
      grpox schema > grpox.schema.json
    and name that file in the first line of run.yaml:
      # yaml-language-server: $schema=grpox.schema.json
    """
    from grpox.cli.discovery import discovered
    from grpox.plugins.registry import Registry
    from grpox.runfile.schema import run_schema

    typer.echo(json.dumps(run_schema(Registry(discovered())), indent=2))


def _load(run: str, overrides: list[str] | None, world_size: int | None = None) -> ResolvedRun:
    from grpox.cli.discovery import tell_warnings
    from grpox.runfile.load import load_run

    resolved = load_run(run, overrides or (), world_size)
    tell_warnings(resolved.registry.plugins)
    return resolved


app.add_typer(cli_plugins.app, name="plugins")
app.add_typer(cli_recipes.app, name="recipes")
app.add_typer(cli_runs.app, name="runs")
