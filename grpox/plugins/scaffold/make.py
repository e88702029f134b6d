"""Writes a new plugin's distribution, over nothing that would be lost."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from grpox.errors import ConfigError, Problem
from grpox.plugins.discovery import PluginSet
from grpox.plugins.requirements import canonical_name
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


def clashes(names: Names, plugins: PluginSet, force: bool = False) -> list[Problem]:
    """One problem for each name that is taken.

    Args:
        force: an installed distribution of the same name is the one to be made anew.
    """
    another = "another name"
    problems = [
        Problem(
            f"{offer.distribution} {offer.version} already offers a {names.kind} '{names.component}'",
            "NAME",
            given=names.component,
            allowed=f"{another}: runs would have to say {names.distribution}:{names.component}",
        )
        for offer in plugins.offers
        if (offer.kind, offer.spec.name) == (names.kind, names.component)
        and canonical_name(offer.distribution) != names.distribution
    ]
    version = _installed(names.distribution)
    if version and not force:
        what = f"a distribution of this name is installed, in version {version}"
        allowed = f"{another}, or --force to make it anew"
        problems.append(Problem(what, "NAME", given=names.distribution, allowed=allowed))
    elif not version and util.find_spec(names.module) is not None:
        what = "a module of this name is installed, which the plugin's own would hide"
        problems.append(Problem(what, "NAME", given=names.module, allowed=another))
    return problems


def _installed(distribution: str) -> str:
    """Its version; empty if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
