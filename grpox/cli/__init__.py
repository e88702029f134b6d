"""The command line: a module for each command, and those that print its results.

`app` lists the commands and imports the one that is called. `errors` prints the error of a failing command,
sets the exit code and ends the process. The package imports almost nothing, so that Ctrl-C is quiet from the
start.
"""

from __future__ import annotations

import sys

from grpox.runtime.signals import exit_code, let_signals_kill

__all__ = ["main", "script"]


def script() -> None:
    """Run `main` as the console script, and end the process."""
    try:
        main()
    except SystemExit as end:
        from grpox.cli.errors import leave

        leave(end.code if isinstance(end.code, int) else 0)


def main() -> None:
    """Run the command line and raise SystemExit: see `grpox.cli.errors` for exit codes."""
    try:
        from grpox.cli.app import app
        from grpox.cli.errors import flush_output, run_command

        code = run_command(lambda arguments: app(arguments, prog_name="grpox"), sys.argv[1:])
        flush_output()
    except KeyboardInterrupt as error:
        # Ctrl-C during an import, or a second one while the first was being handled.
        code = exit_code(error)
    let_signals_kill()
    sys.exit(code)
