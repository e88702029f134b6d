"""The command line: grpox's commands and the commands of plugins, each imported when it is called."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from grpox import __version__
from grpox.cli.arguments import discovered, warn
from grpox.cli.errors import PastTyper, Traceback
from grpox.errors import ConfigError, GrpoxError, Problem, describe
from grpox.plugins.discovery import DISABLE_VARIABLE, OfferedCommand, PluginSet
from grpox.plugins.hookspecs import CommandSpec
from grpox.runtime.signals import raise_if_signal

_HELP = {
    "init": "Write a run file: ask for model, data and reward, and check each answer at once.",
    "train": "Train a model: check the run file, then repeat sampling, scoring and updating.",
    "validate": (
        "Check a run file: keys, types, plugins, files, columns, rows, lengths, batches. Loads no model."
    ),
    "plan": "Draw the flow of batches: the prompts of each rank, and the optimizer steps.",
    "try": "Sample and score a few prompts of a run, without training.",
    "eval": "Evaluate a model on the held-out prompts of a run file, without training.",
    "export": ("Export a checkpoint as a plain Hugging Face model folder with the trained weights."),
    "import-trl": "Convert a script or YAML file for TRL's GRPOTrainer to a run file, without running it.",
    "report": "Write a run's report again: curves, completions, config and versions on one HTML page.",
    "watch": "Show runs on a page while they train: curves, phases, alarms, and a search in all completions.",
    "replay": "Repeat a step whose loss or gradient was NaN or infinite, and show the first such token.",
    "sweep": (
        "Train a grid of runs: every combination of the given values, each in its own process and folder."
    ),
    "doctor": "Check the environment: versions, compatibility, devices, launchers, generators.",
    "schema": "Print the JSON schema of run files, including the parameters of every installed component.",
    "plugins": ("List, show and check installed components and plugins, and write the skeleton of a new one."),
    "recipes": "List the bundled run files, or copy one as a starting point.",
}
"""Name -> first line of the command's help."""
_TARGETS = {
    "eval": "eval:evaluate",
    "try": "try_run:try_run",
    "export": "artifacts:export",
    "report": "artifacts:report",
    "schema": "validate:schema",
    "plugins": "plugins:app",
    "recipes": "recipes:app",
}
"""Module and function, if their names differ from the command's."""
CORE = tuple(
    CommandSpec(name, "grpox.cli." + _TARGETS.get(name, "{0}:{0}".format(name.replace("-", "_"))), text)
    for name, text in _HELP.items()
)
"""grpox's own commands in the order of ``grpox --help``."""
PANEL = "Commands of plugins"


def summary(spec: CommandSpec, panel: str | None = None) -> TyperCommand:
    """Build an entry for lists of commands, with name and help, without an import."""
    return TyperCommand(spec.name, help=spec.help, rich_help_panel=panel)


def load(spec: CommandSpec) -> Any:
    """Import a command and build typer's object for it, under the name in its spec."""
    target = pkgutil.resolve_name(spec.target)
    if isinstance(target, typer.Typer):
        group = get_group(target)
        group.name = spec.name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(spec.name)(target)
    return get_command(alone)


def load_offered(command: OfferedCommand) -> Any:
    """Import a plugin's command, or raise ConfigError. Without a requirement it shows its help and refuses."""
    name = command.spec.name

    def refuse(*_: object) -> None:
        raise ConfigError(f"grpox {name} {command.reason}")

    try:
        loaded = load(command.spec)
        if command.status != "ok":
            loaded.invoke = refuse
        return loaded
    except GrpoxError:
        raise
    except BaseException as error:
        raise_if_signal(error)
        what = f"the command '{name}' of {command.origin} cannot be loaded"
        raise ConfigError(f"{what}: {describe(error)}") from error


def conflict(command: OfferedCommand, offered: Sequence[OfferedCommand]) -> Problem | None:
    """Describe the problem if grpox or another plugin has a command of the same name.

    Args:
        offered: the commands of all plugins.
    """
    name = command.spec.name
    same = [each for each in offered if each.spec.name == name]
    others = {each.distribution for each in same} - {"grpox"}
    if name in _HELP:
        what = f"the command '{name}' of {command.origin} is refused: grpox {__version__} has one of that name"
    elif len(same) > 1:
        owners = " and ".join(each.origin for each in same)
        what = f"{owners} both offer a command '{name}', and grpox does not choose between them"
    else:
        return None
    switch = " or ".join(f"{DISABLE_VARIABLE}={other}" for other in sorted(others))
    return Problem(what, allowed=f"{switch}, or rename the command")


class Commands(TyperGroup):
    """grpox's commands, and the commands of plugins when a name is called that grpox does not have.

    Only the called command is imported; the others are listed by name and help. Some exceptions bypass typer,
    which would turn SIGTERM into exit code 130 and a broken pipe into a silent 1.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._core = {spec.name: spec for spec in CORE}
        self.commands = {name: summary(spec) for name, spec in self._core.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, for ``grpox --help``."""
        self._warn_of_missing()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called.

        Raises:
            ConfigError: a plugin's command has the name of another command, or cannot be loaded.
        """
        self.import_command(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is called."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError, OSError) as error:
            raise PastTyper(error) from error

    @cached_property
    def _plugins(self) -> PluginSet:
        """The installed plugins. The first access also lists their commands."""
        plugins = discovered()
        for each in plugins.commands:
            self.commands.setdefault(each.spec.name, summary(each.spec, PANEL))
        return plugins

    def import_command(self, name: str) -> None:
        """Import a command, if there is one of that name."""
        if name in self._core:
            self.commands[name] = load(self._core[name])
            return
        offered = self._plugins.commands
        for each in offered:
            if each.spec.name == name:
                if problem := conflict(each, offered):
                    raise ConfigError(problem)
                self.commands[name] = load_offered(each)
        if name not in self.commands:
            self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        """Warn of refused commands, and of broken plugins that may have one."""
        plugins = self._plugins
        for record in plugins.records:
            if record.status == "broken":
                warn(f"{record} is broken, so its commands are missing: {record.reason}")
        problems = filter(None, (conflict(each, plugins.commands) for each in plugins.commands))
        # Two commands of one name have the same text.
        for text in dict.fromkeys(f"{problem.what}: {problem.allowed}" for problem in problems):
            warn(text)


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)


def all_commands() -> Commands:
    """Build the command line with every command imported."""
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    for name in group.list_commands(None):
        group.import_command(name)
    return group


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
      grpox train quickstart           a whole run on a CPU, in about a minute
      grpox init                       write a run file of your own
      grpox validate quickstart.yaml   check keys, plugins, files and batches
      grpox plugins list               list losses, rewards, generators, ...
    """
    # The deepspeed launcher passes --local_rank; the rank is read from the environment it also sets.
    if version:
        typer.echo(f"grpox {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
