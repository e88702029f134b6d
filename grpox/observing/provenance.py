"""What a run was made with: versions of Python, libraries and plugins, and the git commit."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata

LIBRARIES = ("grpox", "torch", "transformers", "deepspeed", "datasets", "pluggy", "pydantic", "mlflow")


def versions(plugin_distributions: Iterable[str]) -> dict[str, str]:
    """Versions of Python, the libraries that matter, and the distributions in use besides."""
    names = dict.fromkeys([*LIBRARIES, *plugin_distributions])
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def git_commit() -> str | None:
    """The commit checked out in the working directory, ``-dirty`` when files differ; None outside git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
