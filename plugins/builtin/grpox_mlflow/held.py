"""Who writes a run into MLflow: one process at a time, and none once it is dead."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

FILE = "mlflow.lock"


def hold(folder: Path) -> IO[str] | None:
    """Hold a run's folder until the file that is returned is closed, or the process ends in whatever way.

    None where another process holds it: the run itself, or one that synchronises it. A lock of POSIX's kind:
    processes that this one forks do not inherit it, and so cannot keep it.
    """
    file = (folder / FILE).open("a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
