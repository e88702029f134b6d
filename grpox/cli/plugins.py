"""The commands of ``grpox plugins``; this module imports nothing heavy."""

from __future__ import annotations

import shlex
import textwrap
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from grpox.cli.arguments import Overrides, Ranks, discovered, tell_warnings
from grpox.errors import ConfigError
from grpox.errors.console import Console, folding_table
from grpox.plugins.discovery import discover

HELP = """List, show and check installed components and plugins, and write the skeleton of a new one.

\b
Examples:
  grpox plugins list --kind loss
  grpox plugins list --why
  grpox plugins show dapo
  grpox plugins new mine --kind loss
  grpox plugins check mine
  grpox plugins diff runs/a runs/b
"""
NOTES = {
    "src/{module}/{kind}.py": "the component; a comment marks the line to change",
    "src/{module}/config.py": "its parameters",
    "src/{module}/plugin.py": "its description for grpox",
    "tests/test_conformance.py": "tests of its contract",
    "tests/test_{test}.py": "tests of its numbers, worked by hand",
}
WIDTH = 80
"""Width of the list of other files; lines to copy are not broken."""

Component = Annotated[str, typer.Argument(metavar="NAME", help="NAME, KIND/NAME, DIST:NAME or KIND/DIST:NAME.")]
app = typer.Typer(no_args_is_help=True, help=HELP)


@app.command("new")
def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the component: mine, or grpox-mine.")],
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="loss, reward, advantage, correction, generator, environment, observer, dataset, optimizer or "
            "scheduler.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Parent folder of the new folder grpox-NAME.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write the skeleton of a new component, as a distribution that installs, passes its tests and trains.

    \b
    Examples:
      grpox plugins new mine --kind loss
      grpox plugins new grpox-mine --kind reward --folder ~/plugins
    """
    from grpox.plugins.scaffold.make import make, values_of

    values = values_of(name, kind)
    files = make(values, folder, discovered(), force)
    place, component = folder / values["distribution"], values["component"]
    test = component.replace("-", "_")
    notes = {path.format(**values, test=test): note for path, note in NOTES.items()}
    width = max(map(len, notes))
    others = "and " + ", ".join(path for path in files if path not in notes)
    lines = [
        f"{place}: {values['kind']} '{component}', as its own distribution",
        "",
        *(f"  {path:<{width}}  {note}" for path, note in notes.items()),
        textwrap.fill(others, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
        "",
        "Next:",
        f"  pip install -e {shlex.quote(f'{place}[dev]')}",
        f"  grpox plugins check {component}",
        f"  pytest {shlex.quote(str(place))}",
        f"  {values['train']}",
    ]
    typer.echo("\n".join(lines))


@app.command("list")
def list_components(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list, for programs.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="List only this kind, such as loss or reward.", show_default="all"),
    ] = None,
    why: Annotated[
        bool,
        typer.Option("--why", help="Explain each row that is not ok, with its remedy."),
    ] = False,
) -> None:
    """List every installed component, and every plugin that did not load.

    \b
    Examples:
      grpox plugins list
      grpox plugins list --kind reward
      grpox plugins list --why                explain each row that is not ok
      grpox plugins list --json
    """
    from grpox.cli.plugin_tables import as_table, rows

    plugins, console = discover(), Console(emoji=False)
    listed = rows(plugins, kind)
    if json:
        hidden = () if why else ("why", "remedy")
        shown = [{name: text for name, text in row.items() if name not in hidden} for row in listed]
        typer.echo(dumps(shown, indent=2))
    else:
        failed = [row for row in listed if row["status"] != "ok"]
        console.print(as_table(failed if why else listed, why))
        rest = f"grpox plugins list --why explains the {len(failed)} not ok"
        if why or failed:
            rest = f"rows that are ok: {len(listed) - len(failed)}" if why else rest
            console.print(rest, style="dim", highlight=False)
    tell_warnings(plugins)


@app.command("show")
def show_component(name: Component) -> None:
    """Show a component's parameters, formula, source and capabilities.

    \b
    Examples:
      grpox plugins show dapo
      grpox plugins show reward/math             if several kinds have a math
      grpox plugins show my-plugin:dapo          if several plugins offer a dapo
    """
    from grpox.cli.plugin_tables import details, select

    plugins, console = discovered(), Console()
    for offer in select(plugins, name):
        console.print(details(plugins, offer))


@app.command("check")
def check_component(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="NAME, KIND/NAME, DIST:NAME or KIND/DIST:NAME; or FILE.py:OBJECT."),
    ],
    params: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", help="Parameters, as in a run file.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", metavar="KIND", help="Kind of an object in a file.", show_default="by its methods"
        ),
    ] = None,
) -> None:
    """Check a component against its contract, on a CPU and in seconds. The exit code is 1 if a check fails.

    \b
    Examples:
      grpox plugins check dapo
      grpox plugins check dapo clip_high=0.28    with parameters
      grpox plugins check my-plugin:dapo         if several plugins offer a dapo
      grpox plugins check mine.py:MyLoss         a class or function in a file
    """
    from grpox.cli.plugin_tables import select
    from grpox.runfile.overrides import apply_overrides

    given: dict[str, Any] = {}
    apply_overrides(given, params or [])
    console, is_path = Console(), ".py:" in name
    if kind is not None and not is_path:
        name = f"{kind}/{name.removeprefix(f'{kind}/')}"
    offers = [] if is_path else select(discovered(), name)
    # Imported here because it imports torch: mistakes in the command line are reported before.
    from grpox.cli.plugin_check import check_offer, check_path

    results = [check_path(console, name, given, kind)] if is_path else []
    results += [check_offer(console, offer, given) for offer in offers]
    if not all(results):
        raise typer.Exit(1)


@app.command("lock")
def print_lock(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run file, a recipe, the folder of a run, or a lock file.")
    ],
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the lock to this file instead of printing it."),
    ] = None,
    world_size: Ranks = None,
) -> None:
    """Print the plugin lock of a run: versions, commits and source hashes. Trains nothing.

    \b
    Examples:
      grpox plugins lock run.yaml
      grpox plugins lock quickstart loss=grpo --output before.json
      grpox plugins lock runs/quickstart
    """
    from grpox.runfile.load import load_run
    from grpox.runfile.lock.model import LOCK_FILE, read_lock
    from grpox.runfile.lock.of_run import lock_of

    path = Path(run)
    if (path / LOCK_FILE).is_file() or (path.suffix == ".json" and path.is_file()):
        if overrides:
            what = "overrides need a run file or recipe: they cannot change a finished run or a lock file"
            raise ConfigError(what, given=" ".join(overrides))
        lock = read_lock(path)
    else:
        resolved = load_run(run, overrides or (), world_size)
        tell_warnings(resolved.registry.plugins)
        lock = lock_of(resolved)
    if output is None:
        typer.echo(lock.text(), nl=False)
        return
    try:
        output.write_text(lock.text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", "--output", given=str(output)) from error
    typer.echo(output)


@app.command("diff")
def diff_locks(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The folder of a run, or a lock file.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another.")],
) -> None:
    """Show the differences between two runs in code and config. The exit code is 1 if there are any, else 0.

    \b
    Examples:
      grpox plugins diff runs/first runs/second
      grpox plugins diff before.json runs/first
    """
    from rich.markup import escape
    from rich.text import Text

    from grpox.runfile.lock.differences import run_differences

    console, styles = Console(), {"drift": "red", "environment": "yellow"}
    if differences := run_differences(run_a, run_b):
        table = folding_table("", "what", escape(str(run_a)), escape(str(run_b)))
        for each in differences:
            severity = Text(each.severity.value, styles.get(each.severity.value, ""))
            table.add_row(severity, *map(Text, (each.what, each.old, each.new)))
        console.print(table)
        raise typer.Exit(1)
    same = f"no difference between {run_a} and {run_b}"
    console.print(same, markup=False, highlight=False, soft_wrap=True)
