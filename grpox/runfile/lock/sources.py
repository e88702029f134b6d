"""The files of a distribution's code with their hash, and where it was installed from; nothing is imported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from grpox.errors.redaction import redact


def recorded_files(distribution: metadata.Distribution) -> dict[str, Path]:
    """What pip installed, by RECORD: name -> file; empty where there is no RECORD.

    Left out is what differs from one machine to the next though the code is the same: compiled files, the
    metadata's own folder, and what lies outside the import path, such as scripts with their interpreter's path.
    """
    if distribution.read_text("RECORD") is None:
        # Without it, `files` would be read from SOURCES.txt, which names what a source archive holds.
        return {}
    found = {}
    for entry in distribution.files or ():
        is_metadata = entry.parts[0].endswith((".dist-info", ".egg-info"))
        if is_metadata or ".." in entry.parts or "__pycache__" in entry.parts or entry.suffix == ".pyc":
            continue
        path = Path(str(entry.locate()))
        if path.is_file():
            found[entry.as_posix()] = path
    return found


def module_files(own: Iterable[str], others: Iterable[str], base: Path) -> dict[str, Path]:
    """The ``.py`` files of the packages that modules are in, found where they would be imported from.

    Args:
        own: dotted names of the distribution's modules.
        others: dotted names that may be of another distribution: its files are not taken.
        base: the folder outside of which a module counts as one of another distribution.
    """
    located = [location for name in own if (location := _locate(name))]
    guessed = [location for name in others if (location := _locate(name))]
    located += [(name, path) for name, path in guessed if path.is_relative_to(base)]
    return {name: file for package, path in located for name, file in _python_files(package, path)}


def hash_of(files: Mapping[str, Path]) -> str:
    """SHA-256 over the names and contents of files, in the order of their names."""
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{file_hash(files[name])}\n".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of one file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(module: str) -> tuple[str, Path] | None:
    """The name and place of the outermost package (or single module) of a dotted name; None if there is none.

    A namespace is passed through: its folders hold other distributions too. Importing one runs no code.
    """
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _spec(name)
        if spec is None:
            return None
        if spec.origin is not None:
            path = Path(spec.origin).resolve()
            return name, path.parent if spec.submodule_search_locations is not None else path
    return None


def _spec(name: str) -> ModuleSpec | None:
    try:
        return util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is no package; a module without a spec
        return None


def _python_files(package: str, path: Path) -> Iterator[tuple[str, Path]]:
    name = package.replace(".", "/")
    if not path.is_dir():
        yield name + path.suffix, path
        return
    for file in path.rglob("*.py"):
        inside = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in inside.parts):
            yield f"{name}/{inside.as_posix()}", file


@dataclass(frozen=True)
class Origin:
    """The origin of a distribution; the fields are those of `model.LockedDistribution`."""

    editable: bool
    folder: Path
    """Its project's folder if it is editable, else the one it is installed in."""
    url: str | None = None
    commit: str | None = None
    dirty: bool | None = None


def origin_of(distribution: metadata.Distribution) -> Origin:
    """Read ``direct_url.json`` (PEP 610); ask git about the folder of an editable install."""
    installed = Path(str(distribution.locate_file(""))).resolve()
    direct = _direct_url(distribution)
    url = redact(direct["url"]) if isinstance(direct.get("url"), str) else None
    if direct.get("dir_info", {}).get("editable", False) and url:
        folder = Path(url2pathname(urlsplit(url).path)).resolve()
        return Origin(True, folder, url, *git_state(folder))
    if _is_beside_its_sources(distribution):
        return Origin(True, installed, None, *git_state(installed))
    return Origin(False, installed, url, direct.get("vcs_info", {}).get("commit_id"))


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit checked out, whether tracked files below `folder` differ from it); None outside git.

    A folder that git ignores, inside a repository of something else, is outside.
    """
    try:
        if not _git(folder, "ls-files", "--", "."):
            return None, None
        commit = _git(folder, "rev-parse", "HEAD")
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _direct_url(distribution: metadata.Distribution) -> dict[str, Any]:
    try:
        read = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:  # not for the run to mend
        return {}
    return read if isinstance(read, dict) else {}


def _is_beside_its_sources(distribution: metadata.Distribution) -> bool:
    """Tell whether this is the egg-info that a build leaves in a source tree."""
    text = distribution.read_text
    return text("SOURCES.txt") is not None and text("installed-files.txt") is None and text("RECORD") is None


def _git(folder: Path, *arguments: str) -> str:
    # Set by git for its hooks, they would name another repository than the folder's.
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in misleading}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        env=environment,
    )
    return done.stdout.strip()
