"""How a command ends: what it prints on standard error, and its exit code."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable

import typer

from grpox.errors import ConfigError, GrpoxError
from grpox.signals import Terminated, install_handlers

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
TRACEBACK = "--traceback"
SECONDS_FOR_RANK_0 = 5.0


def run_command(command: Callable[[list[str]], object], arguments: list[str]) -> int:
    """Run `command` and return its exit code: 0, 1 (the run failed), 2 (a mistake of the user's), 130 or 143.

    Args:
        command: takes the arguments without ``--traceback``, which every command so accepts anywhere; it
            returns or raises SystemExit.
    """
    with_traceback = TRACEBACK in arguments
    install_handlers()
    try:
        command([argument for argument in arguments if argument != TRACEBACK])
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort of the command line, which tells every error
        if with_traceback:
            traceback.print_exc()
        return _tell(error, with_traceback)
    return 0


def _tell(error: Exception, with_traceback: bool) -> int:
    given = os.environ.get("RANK", "0")
    rank = int(given) if given.isdecimal() else 0
    if isinstance(error, ConfigError):
        # Every rank finds the same problems, and one tells them.
        for problem in error.problems if rank == 0 else ():
            _print(str(problem))
        if rank != 0:
            _wait_for_rank_0()
    elif isinstance(error, GrpoxError):
        _print(str(error), rank)
    else:
        message = " ".join(str(error).split())
        hint = "" if with_traceback else f"\n    use {TRACEBACK} to see where"
        _print(f"{type(error).__name__}: {message}{hint}" if message else type(error).__name__ + hint, rank)
    return error.exit_code if isinstance(error, GrpoxError) else 1


def _wait_for_rank_0() -> None:
    """A launcher ends all ranks as soon as one has ended: give rank 0 the time to tell the problems."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(SECONDS_FOR_RANK_0)


def _print(text: str, rank: int = 0) -> None:
    typer.secho("error:", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(f" {f'[rank {rank}] ' if rank else ''}{text}", err=True)
