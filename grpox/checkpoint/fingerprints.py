"""Fingerprints of the files that a run reads, so that one that resumes can tell whether they are the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from grpox.config import RunConfig
from grpox.runfile.lock.of_run import file_hash

LARGE = 64 * 2**20
"""Of a file with more bytes, size, beginning and end count: hashing all of it could take minutes."""
END = 2**20
"""Bytes of its beginning, and of its end."""


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Key of the run file -> fingerprint of the file or folder it names; what is on the hub is left out."""
    paths = {"model.path": config.model.path, "data.path": config.data.path}
    if config.evaluation is not None:
        paths["evaluation.path"] = config.evaluation.path
    return {key: _fingerprint(Path(path)) for key, path in paths.items() if path and Path(path).exists()}


def _fingerprint(path: Path) -> str:
    if path.is_file():
        return _of_file(path)
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    parts = (f"{file.relative_to(path)} {_of_file(file)}" for file in files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_file(path: Path) -> str:
    size = path.stat().st_size
    if size <= LARGE:
        return file_hash(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END))
        file.seek(-END, os.SEEK_END)
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"
