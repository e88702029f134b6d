"""How the process of a command ends, once its exit code is known."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from grpox.cli.errors import flush_output


def leave(code: int) -> None:
    """End this process; where no process group was made, by an ordinary SystemExit.

    DeepSpeed keeps process groups alive past their destruction, and with them the native threads of gloo. One
    that releases a Python object while the interpreter is being finalized can abort the process ("terminate
    called without an active exception"), after a run that went well. So what Python does first at its end is
    done here, waiting for threads and calling the exit functions; the finalization itself is left out.
    """
    if "grpox.runtime.world" not in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code)
