"""The commands of ``grpox runs``: tracked runs, read back from MLflow. Importing them imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """Runs that MLflow holds: list, show, compare and open them. Nothing is written.

\b
RUN is an id or the beginning of one, a name, or the run's folder.
Examples:
  grpox runs list
  grpox runs show runs/quickstart
  grpox runs compare runs/first runs/second
  grpox runs open 3f2a91c0
"""

NINE_COLUMNS = 140
"""Columns of a terminal below which the list of runs is written below one another."""
NARROW = 100
"""Columns below which metrics leave out their lowest value."""

app = typer.Typer(no_args_is_help=True, help=HELP)

RUN_HELP = "Its id or the beginning of one, its name, or its folder."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Uri = Annotated[
    str | None,
    typer.Option(
        "--uri",
        metavar="URI",
        help="MLflow's store.",
        show_default="the folder's, MLFLOW_TRACKING_URI, or sqlite:///mlflow.db",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("list")
def list_runs(
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this experiment.", show_default="all")
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow's store.",
            show_default="MLFLOW_TRACKING_URI, or sqlite:///mlflow.db",
        ),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            metavar="STATUS", help="Only those running, finished, failed or killed.", show_default="all"
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="The newest N.")] = 20,
    json: Json = False,
) -> None:
    """List runs, the newest first: how far each came, its last reward, and what its evaluations found.

    \b
    Examples:
      grpox runs list
      grpox runs list --experiment grpox-quickstart --last 5
      grpox runs list --status failed
      grpox runs list --uri http://127.0.0.1:5000 --json
    """
    from grpox_mlflow.runs.listed import as_json, as_table, rows
    from grpox_mlflow.runs.store import default_uri, reading

    with reading(default_uri(uri)) as store:
        listed = rows(store, experiment, status, last)
    if json:
        typer.echo(as_json(listed))
        return
    from rich.console import Console

    from grpox.errors import redact

    console = Console()
    if listed:
        console.print(as_table(listed, narrow=console.width < NINE_COLUMNS))
    else:
        console.print(f"no such run in {redact(store.uri)}", markup=False, highlight=False, soft_wrap=True)


@app.command("show")
def show_run(
    run: Run,
    every_param: Annotated[
        bool, typer.Option("--all", help="Every parameter, not only those that are not the default.")
    ] = False,
    uri: Uri = None,
    json: Json = False,
) -> None:
    """Show a run: how it ended, the parameters that make it what it is, its metrics drawn, its artifacts.

    \b
    Examples:
      grpox runs show runs/quickstart
      grpox runs show 3f2a91c0 --all
      grpox runs show my-run --uri http://127.0.0.1:5000
      grpox runs show my-run --json
    """
    from grpox_mlflow.runs.found import found
    from grpox_mlflow.runs.show import as_json, as_text, shown

    with found([run], uri) as (store, (one,)):
        told = shown(store, one, every_param)
    if json:
        typer.echo(as_json(told))
        return
    from rich.console import Console

    console = Console()
    console.print(as_text(told, every_param, console.width < NARROW, console.encoding))


@app.command("compare")
def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help=RUN_HELP)],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="This metric; may be repeated.", show_default="as in runs show"),
    ] = None,
    uri: Uri = None,
    json: Json = False,
) -> None:
    """Compare runs of one store: parameters that differ, then last, lowest and highest values.

    \b
    Examples:
      grpox runs compare runs/first runs/second
      grpox runs compare 3f2a91c0 77be01d2 first --metric reward
      grpox runs compare first second --metric entropy --metric kl --json
    """
    from grpox_mlflow.runs.compare import as_json, as_text, compared
    from grpox_mlflow.runs.found import found

    if len(runs) < 2:
        raise typer.BadParameter("name at least two runs", param_hint="RUN")
    with found(runs, uri) as (store, several):
        told = compared(store, several, metric or ())
    if json:
        typer.echo(as_json(told))
        return
    from rich.console import Console

    Console().print(as_text(told))


@app.command("open")
def open_run(
    run: Run,
    uri: Uri = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print where it is to be seen.")
    ] = False,
) -> None:
    """Open a run's report in the browser; of a run on a server, its page there.

    It prints the command that serves MLflow's UI, and where the run is then.

    \b
    Examples:
      grpox runs open runs/quickstart
      grpox runs open 3f2a91c0 --no-browser
    """
    from grpox_mlflow.runs.found import found
    from grpox_mlflow.runs.opened import places, show

    with found([run], uri) as (store, (one,)):
        told = places(one, store.uri)
    for line in told.lines():
        typer.echo(line)
    if not no_browser and told.to_open is not None and not show(told.to_open):
        typer.echo("no browser can be opened here", err=True)
