"""Contents of a plugin lock, the hash that names it, and its file in a run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from grpox.errors import ConfigError, nearest
from grpox.plugins.hookspecs import hookimpl
from grpox.runtime.files import read_small, write_atomically

if TYPE_CHECKING:
    from grpox.contracts import RunContext

LOCK_FILE = "plugins.lock.json"


class Locked(BaseModel):
    """A part of a lock; unknown keys are ignored, so that locks of a later grpox can be read."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class LockedDistribution(Locked):
    """Distribution of a component of the run, or of a plugin that observes every run."""

    version: str
    api: int
    """Plugin API version of the distribution's plugins; the oldest if there are several."""
    editable: bool
    """True for an editable install, which runs the code in its source folder."""
    origin: str | None = None
    """Source of the install, as PEP 610 records it; None for a package index."""
    commit: str | None = None
    """Commit of the installed source; for an editable install, the commit checked out in its folder."""
    dirty: bool | None = None
    """True if tracked files of an editable install differ from the commit."""
    files: int
    """Number of files hashed in `sha256`."""
    sha256: str
    """Hash of the names and contents of the source files, see `grpox.runfile.lock.of_run`."""


class LockedComponent(Locked):
    """A component of the run, or a plugin module that observes every run."""

    kind: str
    name: str
    given: Literal["plugin", "path", "python", "unasked"]
    """Form of selection: by name, by path, as a Python object; unasked for a plugin that observes every run."""
    distribution: str | None = None
    target: str = ""
    """``pkg.module:Class``, ``/path/to/file.py:Class``, or the name of a Python object's class or function."""
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    sha256: str | None = None
    """Hash of the file of a component given by path."""


class Lock(Locked):
    """A whole lock: ``distributions`` by name, ``components`` by their key in the run file."""

    format: int = 1
    """Version of the file format."""
    api: int
    """Plugin API version of the grpox that ran."""
    config: str
    """Hash of the resolved config, see `config_hash`."""
    versions: Mapping[str, str]
    distributions: Mapping[str, LockedDistribution]
    components: Mapping[str, LockedComponent]

    @property
    def digest(self) -> str:
        """SHA-256 of the whole lock, independent of its order."""
        return _sha256(self.model_dump(mode="json", exclude_none=True))

    def selected(self) -> Lock:
        """Return the lock without plugins that only observe every run."""
        components = {key: each for key, each in self.components.items() if each.given != "unasked"}
        names = {component.distribution for component in components.values()}
        distributions = {name: each for name, each in self.distributions.items() if name in names}
        return self.model_copy(update={"components": components, "distributions": distributions})

    def text(self) -> str:
        """Write the lock as the JSON of its file, which begins with its digest."""
        data = {"digest": self.digest} | self.model_dump(mode="json", exclude_none=True)
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash a resolved config without ``output_dir``: SHA-256 of canonical JSON, keys sorted, no spaces."""
    return _sha256({key: value for key, value in config.items() if key != "output_dir"})


def _sha256(data: Mapping[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


class LockFile:
    """Observer that writes a run's lock into its folder, after the local record has prepared the folder."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    @hookimpl(tryfirst=True)
    def grpox_run_started(self, run: RunContext) -> None:
        write_atomically(run.output_dir / LOCK_FILE, self._lock.text())


def read_lock(path: Path) -> Lock:
    """Read the lock of a run's folder, or a lock file.

    Raises:
        ConfigError: the lock does not exist or cannot be read.
    """
    file = path / LOCK_FILE if path.is_dir() else path
    try:
        return Lock.model_validate_json(read_small(file))
    except FileNotFoundError as error:
        what = "holds no plugin lock" if path.is_dir() else "no such run folder or lock file"
        around = path if path.is_dir() else path.parent
        runs = sorted(str(each.parent) for each in around.glob(f"*/{LOCK_FILE}"))
        allowed = f"a run's folder with a {LOCK_FILE}" + (f", such as {', '.join(runs[:5])}" if runs else "")
        raise ConfigError(what, given=str(path), allowed=allowed, nearest=nearest(str(path), runs)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", given=str(file)) from error
    except (ValidationError, UnicodeDecodeError) as error:
        allowed = f"{LOCK_FILE}, as a run or `grpox plugins lock` writes it"
        raise ConfigError("is not a plugin lock", given=str(file), allowed=allowed) from error
