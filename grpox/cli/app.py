"""The command line itself: it finds the command that is called, and imports that one alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from grpox import __version__
from grpox.cli.commands import CORE, PANEL, conflict, conflict_remedy, load, load_offered, summary
from grpox.cli.errors import PastTyper
from grpox.cli.train import Traceback
from grpox.errors import ConfigError, Problem
from grpox.plugins.discovery import PluginSet


class Commands(TyperGroup):
    """grpox's commands, and where one is meant that is not among them, those of plugins.

    A command that is only listed stands there by its name and help; the one that is called is imported. Typer
    would swallow some exceptions, making 130 of a SIGTERM and a silent 1 of a broken pipe: they pass by it.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._core = {spec.name: spec for spec in CORE}
        self._plugins: PluginSet | None = None
        self.commands = {name: summary(spec) for name, spec in self._core.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, for ``grpox --help``."""
        self._tell_what_is_missing()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called.

        Raises:
            ConfigError: it is a plugin's, and its name another's too, or it cannot be loaded.
        """
        if args[0] in self._core:
            self.commands[args[0]] = load(self._core[args[0]])
        else:
            self._load_of_plugin(args[0])
        return super().resolve_command(ctx, args)

    def load_all(self) -> None:
        """Import every command, for the reference of commands."""
        self._look_for_plugins()
        for name in list(self.commands):
            if name in self._core:
                self.commands[name] = load(self._core[name])
            else:
                self._load_of_plugin(name)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is called."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError, OSError) as error:
            raise PastTyper(error) from error

    def _look_for_plugins(self) -> PluginSet:
        """Find what plugins bring, once."""
        if self._plugins is None:
            from grpox.cli.arguments import discovered

            self._plugins = discovered()
            for each in self._plugins.commands:
                self.commands.setdefault(each.spec.name, summary(each.spec, PANEL))
        return self._plugins

    def _load_of_plugin(self, name: str) -> None:
        offered = self._look_for_plugins().commands
        for each in offered:
            if each.spec.name == name:
                if told := conflict(each, offered):
                    raise ConfigError(Problem(told, allowed=conflict_remedy(each, offered)))
                self.commands[name] = load_offered(each)
        if name not in self.commands:
            self._tell_what_is_missing()

    def _tell_what_is_missing(self) -> None:
        """Tell which commands are refused, and which plugins are broken and might have brought one."""
        from grpox.cli.arguments import warn

        plugins = self._look_for_plugins()
        for record in plugins.records:
            if record.status == "broken":
                warn(f"{record} is broken, and its commands are not here: {record.reason}")
        told = [(conflict(each, plugins.commands), each) for each in plugins.commands]
        # Two that hold one name are told in the same words.
        for text, each in dict(told).items():
            if text:
                warn(f"{text}: {conflict_remedy(each, plugins.commands)}")


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


def all_commands() -> Commands:
    """The command line with every command imported."""
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    group.load_all()
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
