"""The commands `grpox runs` and `grpox sync`. Importing them imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpox.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from grpox_mlflow.views import View

HELP = """List, show, compare and open runs, from their folders.

\b
Examples:
  grpox runs list
  grpox runs show runs/quickstart
"""

runs_app = typer.Typer(no_args_is_help=True, help=HELP)

RUN_HELP = "Folder of a run, or its name."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@runs_app.command("list")
def list_runs(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder in which runs are searched for.", show_default="this one"
        ),
    ] = Path(),
    status: Annotated[
        str | None,
        typer.Option(
            metavar="STATUS",
            help="List only runs with this status: running, finished, failed or killed.",
            show_default="all",
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="List the newest N runs.")] = 20,
    json: Json = False,
) -> None:
    """List runs, the newest first, with their steps, last reward and evaluations.

    \b
    Examples:
      grpox runs list
      grpox runs list /data/runs --last 5
      grpox runs list --status failed
      grpox runs list --json
    """
    from grpox_mlflow import views

    _print(lambda console: views.list_runs(folder, status, last, console), json)


@runs_app.command("show")
def show_run(
    run: Run,
    has_all_params: Annotated[
        bool, typer.Option("--all", help="Show all parameters, also those with their default.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a run: outcome, parameters that are not the default, curves of metrics, artifacts.

    \b
    Examples:
      grpox runs show runs/quickstart
      grpox runs show quickstart --all
      grpox runs show my-run --json
    """
    from grpox_mlflow import views
    from grpox_mlflow.folders import find_run

    _print(lambda console: views.show_run(find_run(run), has_all_params, console), json)


@runs_app.command("compare")
def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help=RUN_HELP)],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Metric to show; may be repeated.", show_default="as in runs show"),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a page with the curves of all runs and all their differences.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare runs: differing parameters, then last, lowest and highest values of metrics.

    \b
    Examples:
      grpox runs compare runs/first runs/second
      grpox runs compare first second third --metric reward
      grpox runs compare first second --metric entropy --metric kl --json
      grpox runs compare first second --html compared.html
    """
    from grpox.toolkit import write_comparison
    from grpox_mlflow import views
    from grpox_mlflow.folders import find_run

    if len(runs) < 2:
        raise typer.BadParameter("name at least two runs", param_hint="RUN")
    several = [find_run(run) for run in runs]
    _print(lambda console: views.compare_runs(several, metric or ()), json)
    if html is not None:
        try:
            typer.echo(write_comparison([run.folder for run in several], html), err=json)
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            raise ConfigError(what, "--html", given=str(error.filename or html)) from error


@runs_app.command("open")
def open_run(
    run: Run,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the places.")] = False,
) -> None:
    """Open a run's report in the browser, or the page of a run on a server.

    If MLflow tracks the run, also print the command that starts MLflow's UI, and the run's address there.

    \b
    Examples:
      grpox runs open runs/quickstart
      grpox runs open quickstart --no-browser
    """
    import webbrowser

    from grpox_mlflow.folders import find_run
    from grpox_mlflow.views import places

    lines, address = places(find_run(run))
    for name, place in lines.items():
        typer.echo(f"{name + ':':<8}{place}")
    if not no_browser and address is not None and not webbrowser.open(address):
        typer.echo("there is no browser to open here", err=True)


def sync(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder (its output_dir).")],
    tracking_uri: Annotated[
        str | None,
        typer.Option("--tracking-uri", metavar="URI", help="Store to write to.", show_default="the run's own"),
    ] = None,
) -> None:
    """Write to MLflow the missing data of a run whose server was unreachable for a time.

    The run's folder has everything: each metric with its time, parameters, tags,
    completions, the report and the outcome. Existing data in MLflow stays
    unchanged, so a second sync has no effect. A run that was killed without
    an outcome gets the status KILLED.

    \b
    Examples:
      grpox sync runs/quickstart
      grpox sync runs/quickstart --tracking-uri http://127.0.0.1:5000
    """
    from rich.console import Console
    from rich.progress import Progress

    from grpox.toolkit import pluralize
    from grpox_mlflow.sync import sync as write_missing

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("metrics", total=None)
        shipment = write_missing(
            run_dir, tracking_uri, lambda position, size: bar.update(task, completed=position, total=size)
        )
    values, files = pluralize(shipment.values, "value"), pluralize(shipment.files, "completion file")
    typer.echo(f"{run_dir} ({shipment.status}): {values} and {files} written\n{shipment.place}")


def _print(view: Callable[[Console], View], as_json: bool) -> None:
    from json import dumps

    from rich.console import Console

    console = Console()
    content, page = view(console)
    if as_json:
        typer.echo(dumps(content, indent=2))
    else:
        console.print(page)
