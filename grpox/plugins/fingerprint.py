"""What the answer of a plugin depends on, as a short text, found without importing the plugin.

A plugin that was installed from a wheel is known by the hashes in its RECORD; one whose files may change in
place (an editable install, a folder on PYTHONPATH) by path, size and time of each of them. Neither says
anything of a module that another distribution holds: therefore the versions of what it requires count too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import machinery, metadata
from pathlib import Path

import grpox
from grpox.plugins import hookspecs, loader
from grpox.plugins.hookspecs import API_VERSION
from grpox.plugins.requirements import canonical_name

_IMPORTABLE = tuple(machinery.all_suffixes())
_DISTRIBUTION = (".dist-info", ".egg-info")


@dataclass(frozen=True)
class Facts:
    """What a distribution's METADATA says; empty texts for a folder that has none."""

    name: str
    version: str
    requires: tuple[str, ...]
    folder: str
    """The one that holds its modules, or for an editable install the link to them."""


@lru_cache(maxsize=1024)
def facts(distribution: metadata.Distribution) -> Facts:
    """Read once: the properties of `importlib.metadata` parse the whole file each time."""
    headers = distribution.metadata
    name, version = (str(headers[key] or "") if key in headers else "" for key in ("Name", "Version"))
    requires = tuple(headers.get_all("Requires-Dist") or ())
    return Facts(name, version, requires, str(distribution.locate_file("")))


class Surroundings:
    """This Python, this grpox and what is installed beside it, as they are when this is made."""

    def __init__(self) -> None:
        # The rules by which plugins are judged may change while grpox is worked on and keeps its version.
        judges = [Path(module.__file__ or "") for module in (hookspecs, loader)]
        stamps = [_stamp(judge) for judge in judges if judge.is_file()]
        self._core = [sys.version, grpox.__version__, str(API_VERSION), *stamps]
        self._installed = dict(_installed())

    @cached_property
    def fingerprint(self) -> str:
        """Changes when anything is installed or removed, and from one machine to another.

        Under this the failure of a plugin is remembered: what it lacks may be in any distribution, and a driver
        in one machine only.
        """
        return _digest([*self._core, platform.node(), *map(str, sorted(self._installed.items()))])

    def of(self, entry_point: metadata.EntryPoint) -> str | None:
        """What this plugin's answer depends on; None where that cannot be told, so that it must be asked."""
        distribution = entry_point.dist
        if distribution is None:
            return None
        try:
            parts = [*self._core, *self._required(distribution), *_sources(entry_point.module, distribution)]
            return _digest([*parts, facts(distribution).version])
        except Exception:  # noqa: BLE001 - an import hook of any package may raise whatever it likes
            return None

    def _required(self, distribution: metadata.Distribution) -> Iterator[str]:
        """What is installed of each distribution that this one requires."""
        for requirement in facts(distribution).requires:
            if match := re.match(r"[\w.-]+", requirement):
                name = canonical_name(match.group())
                yield f"{name} {self._installed.get(name)}"


def _installed() -> Iterator[tuple[str, str]]:
    """(name, folder and its time) of every distribution; the first on `sys.path` comes last, and so counts."""
    for folder in reversed(sys.path):
        try:
            with os.scandir(folder or ".") as entries:
                found = [entry for entry in entries if entry.name.endswith(_DISTRIBUTION)]
                for entry in sorted(found, key=lambda entry: entry.name):
                    name = canonical_name(entry.name.rpartition(".")[0].partition("-")[0])
                    yield name, f"{entry.name} {entry.stat().st_mtime_ns}"
        except OSError:
            continue


def _sources(module: str, distribution: metadata.Distribution) -> Iterator[str]:
    """The content of RECORD if it holds the module, else a stamp of each file of the module's package."""
    root, file = _located(module)
    record = distribution.read_text("RECORD") or ""
    if file is not None and _recorded(file, record, distribution):
        # Its own file may still be edited in place by someone who looks for a mistake.
        yield from (record, _stamp(file))
    elif root is not None:
        yield from map(_stamp, [root] if root.is_file() else _modules(root))


def _recorded(file: Path, record: str, distribution: metadata.Distribution) -> bool:
    relative = os.path.relpath(file, facts(distribution).folder)
    return any(line.startswith(f"{relative},") for line in record.splitlines())


def _located(module: str) -> tuple[Path | None, Path | None]:
    """(outermost package or single file, file) of a module, found by path: None for what is not there.

    `find_spec` of a dotted name would import its parents. A folder without ``__init__.py`` may be shared with
    other distributions: of those the innermost one counts.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None, None
    if spec.submodule_search_locations is None:
        file = Path(spec.origin) if spec.origin else None
        return file, file
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    root = None
    for position in range(len(rest) + 1):
        package = next((folder for folder in folders if (folder / "__init__.py").exists()), None)
        root = root or package
        if position < len(rest):
            file = next((f for folder in folders if (f := folder / f"{rest[position]}.py").exists()), None)
            if file is not None:
                return root or file.parent, file
            folders = [inner for folder in folders if (inner := folder / rest[position]).is_dir()]
    return root, None if package is None else package / "__init__.py"


def _modules(folder: Path) -> Iterator[Path]:
    """Every file below `folder` that Python would import; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(_IMPORTABLE))


def _stamp(file: Path) -> str:
    found = file.stat()
    return f"{file} {found.st_mtime_ns} {found.st_size}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
