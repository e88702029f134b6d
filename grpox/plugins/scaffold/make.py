"""Writes a new plugin's distribution, over nothing that would be lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpox.errors import ConfigError, Problem
from grpox.plugins.discovery import PluginSet
from grpox.plugins.scaffold.clashes import clashes
from grpox.plugins.scaffold.names import Names, names_of
from grpox.plugins.scaffold.render import rendered


@dataclass(frozen=True)
class Made:
    """A distribution that was written."""

    names: Names
    folder: Path
    files: list[str]
    """Paths within `folder`."""


def make(given: str, kind: str, parent: Path, plugins: PluginSet, force: bool = False) -> Made:
    """Write the distribution of a new plugin into a folder of its name within `parent`.

    Args:
        given: its name, with or without ``grpox-``.
        plugins: what is installed, whose names are taken.
        force: write over the files of a folder that is not empty; others in it stay.

    Raises:
        ConfigError: a name is wrong or taken, the folder is not empty, or it cannot be written.
    """
    names = names_of(given, kind)
    folder = parent / names.distribution
    problems = clashes(names, plugins, force)
    try:
        if not force and folder.is_dir() and any(folder.iterdir()):
            allowed = "another --folder, or --force to write over the files of that name"
            problems.append(Problem("is there and not empty", given=str(folder), allowed=allowed))
        if problems:
            raise ConfigError(problems)
        files = rendered(names)
        for name, text in files.items():
            _write(folder / name, text)
    except OSError as error:
        there = isinstance(error, FileExistsError | NotADirectoryError)
        what = "is not a folder" if there else f"cannot be written: {error.strerror or error}"
        raise ConfigError(Problem(what, given=str(error.filename or folder))) from error
    return Made(names, folder, list(files))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
