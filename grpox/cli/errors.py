"""The end of a command and its process: errors on standard error, and the exit code."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated

import typer

from grpox.errors import (
    TEXT,
    TRACE,
    ConfigError,
    GrpoxError,
    describe,
    left_by_rich,
    plain,
    shorten,
    traceback_of,
    visible,
)
from grpox.errors.redaction import redact
from grpox.runtime import launch
from grpox.runtime.files import restrict_umask
from grpox.runtime.logs import DISPLAYED, get_logger, hide_logs, show_logs
from grpox.runtime.signals import exit_code, install_handlers

logger = get_logger(__name__)
OUTPUT_CLOSED = 128 + signal.SIGPIPE
TRACEBACK = "--traceback"
Traceback = Annotated[
    bool, typer.Option(TRACEBACK, help="Show the traceback of an error; every command accepts this option.")
]
SECONDS_FOR_RANK_0 = 5.0
MOST_PROBLEMS = 50
"""Largest number of problems that are printed."""


class PastTyper(Exception):
    """Wraps an exception that typer would swallow: an interrupt, the end of a file, a broken pipe."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def run_command(command: Callable[[list[str]], object], arguments: list[str]) -> int:
    """Run `command` and return its exit code.

    Codes: 0, 1 (the run failed), 2 (the user's mistake), 130 (interrupted), 143 (terminated), or 141 (the
    reader of the output has closed it, as in git).

    Args:
        command: takes the arguments without ``--traceback``, which is accepted anywhere; it returns or raises
            SystemExit.
    """
    with_traceback = TRACEBACK in arguments
    restrict_umask()
    install_handlers()
    try:
        show_logs()  # commands with log options call it again
        command([argument for argument in arguments if argument != TRACEBACK])
    except PastTyper as carrier:
        return _code_of(carrier.error, with_traceback)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort, which reports all
        return _code_of(error, with_traceback)
    finally:
        hide_logs()
    return 0


def flush_output() -> None:
    """Write the buffered output. If its reader has closed it, prevent Python's complaint at exit."""
    if sys.stdout is None:  # started without one: `grpox ... >&-`
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> None:
    """End this process; without a process group, by an ordinary SystemExit.

    DeepSpeed keeps process groups and their native gloo threads alive after their destruction. A gloo thread
    that releases a Python object during the interpreter's finalization can abort the process ("terminate
    called without an active exception") after a successful run. This function therefore waits for threads and
    calls the exit functions, as Python does at its end, and skips the finalization itself.
    """
    if "grpox.runtime.world" not in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code)


def _code_of(error: BaseException, with_traceback: bool) -> int:
    """Print an error if the user needs to see it, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _print_notes(error)
        return exit_code(error)
    if left_by_rich(error) or (isinstance(error, BrokenPipeError) and _nobody_reads()):
        return OUTPUT_CLOSED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if with_traceback:
        typer.echo(visible(redact(traceback_of(error))), err=True, nl=False)
    return _print_error(error, with_traceback)


def _print_notes(error: BaseException) -> None:
    """Print what a command adds to an error, such as how to go on."""
    for note in getattr(error, "__notes__", ()):
        typer.echo(visible(redact(str(note))), err=True)


def _nobody_reads() -> bool:
    """Return True if standard output is a pipe closed at its other end: other pipes break too."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _print_error(error: BaseException, with_traceback: bool) -> int:
    rank = launch.rank_or_zero()
    if isinstance(error, ConfigError):
        # All ranks usually have the same problems, and rank 0 prints them. A launcher ends all ranks as soon as
        # one has ended: a rank that is still alive then has other problems, such as a missing plugin.
        if rank != 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(SECONDS_FOR_RANK_0)
        texts = [str(problem) for problem in error.problems[:MOST_PROBLEMS]]
        if error.problems[MOST_PROBLEMS:]:
            texts.append(f"and at least {len(error.problems) - MOST_PROBLEMS} more")
    elif isinstance(error, GrpoxError):
        texts = [str(error)]
    else:
        hint = "" if with_traceback else f"\n    {TRACEBACK} shows where"
        texts = [plain(describe(error), TEXT) + hint]
    for text in texts:
        message = visible(redact(shorten(text, TRACE)))
        typer.secho("error:", fg=typer.colors.RED, bold=True, err=True, nl=False)
        typer.echo(f" {f'[rank {rank}] ' if rank else ''}{message}", err=True)
        logger.error("%s", message, extra=DISPLAYED)
    _print_notes(error)
    return error.exit_code if isinstance(error, GrpoxError) else 1
