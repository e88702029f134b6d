"""The manifest of a checkpoint: size and hash of each of its files, and whether they are still so.

The hash is XXH3 (128 bits): it finds what a disk damaged, as quickly as the disk reads. Who can write the files
can write the manifest as well, so that no cryptographic hash would tell more.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128

from grpox.runtime.files import sync

MANIFEST = "manifest.json"
FORMAT = 3
"""Version of the layout of a checkpoint."""


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    size: int
    """Bytes."""
    xxh3: str


class Hashed:
    """A file that is hashed while it is written, for what writes from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxh3_128()
        self._size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def facts(self) -> FileFacts:
        """What was written so far."""
        return FileFacts(self._size, self._hash.hexdigest())


def files_of(folder: Path) -> list[str]:
    """Every file below `folder` but the manifest, as paths relative to it, sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def facts_of(folder: Path, names: list[str]) -> dict[str, FileFacts]:
    """Size and hash of some files of `folder`."""
    return {name: _facts(folder / name) for name in names}


def write_manifest(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Write the manifest, on disk when this returns."""
    held = {"format": FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    path = folder / MANIFEST
    path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    sync(path)


def read_manifest(folder: Path) -> dict[str, FileFacts]:
    """What the files of a checkpoint must be.

    Raises:
        ValueError: the manifest is missing, is none or names no files.
    """
    try:
        held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if held["format"] != FORMAT:
            raise ValueError(f"its layout is version {held['format']}, this grpox reads {FORMAT}")
        if not held["files"]:
            raise ValueError(f"{MANIFEST} names no files")
        return {name: FileFacts(**facts) for name, facts in held["files"].items()}
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST} is missing") from error
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from error


def faults(folder: Path, wanted: Mapping[str, FileFacts]) -> list[str]:
    """What is wrong with some files of `folder`, a line each; empty where all are as they were written."""
    found = (_fault(folder / name, facts) for name, facts in wanted.items())
    return [f"{name} {fault}" for name, fault in zip(wanted, found, strict=True) if fault]


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxh3_128).hexdigest()
        return FileFacts(file.tell(), digest)


def _fault(path: Path, wanted: FileFacts) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "cannot be read: it is no file"  # a pipe would be waited on
        size = found.st_size
        if size != wanted.size:
            return f"has {size} bytes, not {wanted.size}"
        return "" if _facts(path) == wanted else "has another content than was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
