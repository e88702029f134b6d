"""Where an installed distribution comes from: PEP 610's record, and git for one that is edited in place."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from grpox.errors.redaction import redact


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
    """Whether this is the egg-info that a build leaves in a source tree, found by the working directory."""
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
