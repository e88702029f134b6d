"""`grpox watch`: serves the page of runs to this machine's user, while they train and afterwards."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from grpox.cli.arguments import warn
from grpox.errors import ConfigError, Problem, describe, nearest
from grpox.runtime.signals import Terminated

DEPTH = 3
"""Levels of folders below this one in which runs are searched by their names, as `grpox runs` does."""
MOST_NAMED = 8
"""Largest number of runs that a message names."""


def watch(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs, or their names.", show_default=False),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port of 127.0.0.1; 0: a free one.")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser.")] = False,
) -> None:
    """Show runs on a page while they train: curves, phases, alarms, and a search in all completions.

    The first line of the output is the page's address. Only this machine's user
    can open it: the address holds a token, and the server listens on 127.0.0.1.
    For a run on another machine the second line is a command that makes the
    page reachable there. Ctrl-C ends the server; the runs go on.

    \b
    Examples:
      grpox watch runs/quickstart
      grpox watch runs/first runs/second --port 8321 --no-browser
      grpox train quickstart --watch      the page of a run, as long as it trains
    """
    from grpox.observing.page.server import address_of, new_token, open_listener, serve

    matches = [find_run(run) for run in runs]
    if problems := [match for match in matches if isinstance(match, Problem)]:
        raise ConfigError(problems)
    folders = [match for match in matches if isinstance(match, Path)]
    try:
        listener = open_listener(port)
    except OSError as error:
        what = f"cannot be used: {error.strerror or error}"
        raise ConfigError(what, "--port", given=str(port), allowed="a free port, or 0") from error
    address = address_of(listener, new_token())
    try:
        with listener:
            print_address(address)
            if not no_browser:
                open_browser(address)
            serve(listener, address.rpartition("=")[2], folders)
    except Terminated:
        raise
    except KeyboardInterrupt:
        return  # Ctrl-C is how the command is meant to end


@contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Serve the page of a run within the block, in another process; the run goes on if that is not possible."""
    from grpox.observing.page.server import serve_beside
    from grpox.runtime.workers import ChildFailed

    with ExitStack() as served:
        try:
            address = served.enter_context(serve_beside(folder))
        except (OSError, ChildFailed) as error:
            warn(f"--watch: the page cannot be served: {describe(error)}")
        else:
            print_address(address)
        yield


def print_address(address: str) -> None:
    """Print the page's address, and the command that makes it reachable from another machine."""
    port = address.partition("?")[0].rstrip("/").rpartition(":")[2]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "USER"
    typer.echo(address)
    typer.echo(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}")
    if sys.stdout is not None:
        sys.stdout.flush()


def open_browser(address: str) -> threading.Thread | None:
    """Open the address in a browser where the user sees one: not without a screen, and not over SSH.

    Returns:
        the thread that opens it, because some browsers are waited for.
    """
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if not has_screen or os.environ.get("SSH_CONNECTION"):
        return None
    import webbrowser

    thread = threading.Thread(target=webbrowser.open, args=(address,), daemon=True)
    thread.start()
    return thread


def find_run(run: str) -> Path | Problem:
    """Return the folder of a run, given by its path or name, or the problem."""
    from grpox.observing.page.server import is_run, runs_below
    from grpox.runtime.run_lock import is_locked

    folder, inside = Path(run), list[Path]()
    with suppress(OSError):  # a name that is too long
        if is_run(folder) or (folder.is_dir() and is_locked(folder)):
            return folder
        inside = list(runs_below(folder)) if folder.is_dir() else []
    known = list(runs_below(Path(), DEPTH))
    matches = inside or [each for each in known if each.name == run]
    if len(matches) == 1 and not inside:
        return matches[0]
    if matches:
        allowed = f"one of {', '.join(map(str, matches[:MOST_NAMED]))}"
        return Problem("is not one run: it means several", "RUN", given=run, allowed=allowed)
    near = nearest(run, sorted({word for each in known for word in (str(each), each.name)}))
    allowed = "folder or name of a run: grpox runs list"
    return Problem("no such run here", "RUN", given=run, allowed=allowed, nearest=near)
