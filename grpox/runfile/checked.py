"""Remembers which components have passed ``grpox plugins check`` on this machine, and names those of a run that
have not.

The record is ``grpox/checks.json`` in the user's cache folder (`XDG_CACHE_HOME`, or ``~/.cache``). Built-in
components are not in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox.plugins.component import BoundComponent
from grpox.plugins.requirements import canonical_name
from grpox.runfile.lock.of_run import file_hash, module_files
from grpox.runtime.files import write_atomically, write_error_message

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun


def checks_file() -> Path:
    """Return the path of the record."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG ignores relative paths.
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "grpox" / "checks.json"


def is_built_in(bound: BoundComponent) -> bool:
    """Tell whether a component comes with grpox."""
    return bound.offer is not None and canonical_name(bound.offer.distribution) == "grpox"


def record_pass(bound: BoundComponent) -> str:
    """Note that a component has passed its check.

    Returns:
        Why it could not be noted; empty if it was, or if the component is built in.
    """
    if is_built_in(bound):
        return ""
    path = checks_file()
    passed = {
        "version": bound.offer.version if bound.offer else None,
        "sha256": code_hash(bound),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        write_atomically(path, json.dumps(_read(path) | {name_of(bound): passed}, indent=2) + "\n")
    except OSError as error:
        return write_error_message(error, path)
    return ""


def unchecked_message(run: ResolvedRun) -> str:
    """Name the components of a run that have never passed their check here, or have changed since; empty if
    none."""
    passed, names, commands = _read(checks_file()), [], []
    # One object in several places has one check.
    bounds = {name_of(bound): bound for key, bound in run.components.items() if key not in run.given.functions}
    for name, bound in bounds.items():
        if is_built_in(bound):
            continue
        before = passed.get(name)
        if isinstance(before, dict) and before.get("sha256") == code_hash(bound):
            continue
        names.append(str(bound) + (" (changed since)" if before else ""))
        commands.append(f"grpox plugins check {shlex.quote(command_argument(bound))}")
    if not names:
        return ""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names)} {verb} not passed the check of {_kinds(len(names))} here: {'; '.join(commands)}"


def _kinds(count: int) -> str:
    return "its kind" if count == 1 else "their kinds"


def name_of(bound: BoundComponent) -> str:
    """Name a component in the record: ``loss/grpox-mine:mine``, or ``loss//path/mine.py:Mine``."""
    return f"{bound.kind}/{command_argument(bound).removeprefix(f'{bound.kind}/')}"


def command_argument(bound: BoundComponent) -> str:
    """Return what ``grpox plugins check`` calls a component."""
    if bound.offer is not None:
        return f"{bound.kind}/{bound.offer.qualified_name}"
    return f"{_file_of(bound)}:{bound.label}"


def code_hash(bound: BoundComponent) -> str:
    """Hash the component's code: the package of a plugin, without importing it, or the file of an object."""
    if bound.offer is None:
        files = {"": _file_of(bound)}
    else:
        files = module_files([bound.offer.spec.target.partition(":")[0]], (), Path())
    whole = hashlib.sha256()
    for name in sorted(files):
        if files[name].is_file():
            whole.update(f"{name}\0{file_hash(files[name])}\n".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _file_of(bound: BoundComponent) -> Path:
    """Return the file of an object that was named by path."""
    module = sys.modules.get(getattr(bound.load(), "__module__", None) or "")
    return Path(str(getattr(module, "__file__", None) or "unknown"))


def _read(path: Path) -> dict[str, Any]:
    """Read the record; one that is missing or damaged is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
