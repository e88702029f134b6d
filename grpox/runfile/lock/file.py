"""The lock on disk: written when a run starts, read back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from grpox.errors import ConfigError, Problem, nearest
from grpox.plugins.hookspecs import hookimpl
from grpox.runfile.lock.model import Lock
from grpox.runtime.files import write_whole

if TYPE_CHECKING:
    from grpox.contracts import RunContext

LOCK_FILE = "plugins.lock.json"


class LockFile:
    """The observer that writes a run's lock into its folder, once the local record has made room there."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    @hookimpl(tryfirst=True)
    def grpox_run_started(self, run: RunContext) -> None:
        write_whole(run.output_dir / LOCK_FILE, self._lock.text())


def read_lock(path: Path) -> Lock:
    """The lock of a run's folder, or of a lock file itself.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    file = path / LOCK_FILE if path.is_dir() else path
    try:
        return Lock.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(_no_lock(path)) from error
    except OSError as error:
        raise ConfigError(Problem(f"cannot be read: {error.strerror}", given=str(file))) from error
    except (ValidationError, UnicodeDecodeError) as error:
        allowed = f"{LOCK_FILE}, as a run or `grpox plugins lock` writes it"
        raise ConfigError(Problem("is no plugin lock", given=str(file), allowed=allowed)) from error


def _no_lock(path: Path) -> Problem:
    what = "holds no plugin lock" if path.is_dir() else "no such run folder or lock file"
    around = path if path.is_dir() else path.parent
    runs = sorted(str(found.parent) for found in around.glob(f"*/{LOCK_FILE}"))
    near = nearest(str(path), runs)
    allowed = f"a run's folder with a {LOCK_FILE}" + (f", such as {', '.join(runs[:5])}" if runs else "")
    return Problem(what, given=str(path), allowed=allowed, nearest=near)
