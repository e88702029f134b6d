"""A checkpoint's folder: ``checkpoints/step-00000050`` in the run's, under another name until it is whole.

Its manifest holds size and hash of each file. The hash is XXH3 (128 bits): it finds what a disk damaged, as
quickly as the disk reads. Who can write the files can write the manifest as well, so that no cryptographic hash
would tell more.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from xxhash import xxh3_128

from grpox.runtime.files import sync

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 3
"""Version of the layout of a checkpoint."""
_NAME = re.compile(r"step-(\d{8,})")

Content = TypeVar("Content")


def folder_of(output_dir: Path, step: int) -> Path:
    """The checkpoint after `step` optimizer steps."""
    return output_dir / FOLDER / f"step-{step:08d}"


def unfinished_of(folder: Path) -> Path:
    """What a folder is called while it is written; whoever looks for checkpoints does not find it."""
    return folder.with_name(f".{folder.name}.unfinished")


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank keeps what it has for itself."""
    return folder / f"rank-{rank:05d}.pt"


def step_of(folder: Path) -> int:
    """Its optimizer steps, by its name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder.name} is no checkpoint's name, such as step-00000050")
    return int(match[1])


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The checkpoints of a run's folder, newest first; whether they are good is another question."""
    parent = output_dir / FOLDER
    folders = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(folders, key=step_of, reverse=True)


def publish(folder: Path) -> None:
    """Give what is whole the name `folder`, on disk when this returns. One that was there is replaced."""
    unfinished = unfinished_of(folder)
    for path in (p for p in (unfinished, *unfinished.rglob("*")) if p.is_dir()):
        sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    sync(folder.parent)


def clear_unfinished(output_dir: Path) -> None:
    """Remove what runs that were killed while they saved have left."""
    for path in (output_dir / FOLDER).glob(".step-*.unfinished"):
        shutil.rmtree(path)


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    size: int
    """Bytes."""
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Read them from a file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxh3_128).hexdigest()
            return cls(file.tell(), digest)


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


def write_text(path: Path, text: str) -> None:
    """Write a small file, on disk when this returns."""
    path.write_text(text + "\n", encoding="utf-8")
    sync(path)


def write_manifest(folder: Path, known: Mapping[str, FileFacts] | None = None) -> None:
    """Write the manifest of all files below `folder`, on disk when this returns.

    Args:
        known: by paths relative to the folder: files that were hashed while they were written.
    """
    files = dict(known or {})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and name not in files:
            files[name] = FileFacts.of(path)
    content = {"format": FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_text(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> dict[str, FileFacts]:
    """What the files of a checkpoint must be.

    Raises:
        ValueError: the manifest is missing, is none or names no files.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its layout is version {content['format']}, this grpox reads {FORMAT}")
        if not content["files"]:
            raise ValueError(f"{MANIFEST} names no files")
        return {name: FileFacts(**facts) for name, facts in content["files"].items()}
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST} is missing") from error
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from error


def read_whole(folder: Path, read: Callable[[Path], Content]) -> Content:
    """Return what `read` finds in a folder whose files are all as they were written.

    Raises:
        ValueError: some are not, or `read` raises it.
    """
    if damage := faults(folder, read_manifest(folder)):
        raise ValueError("; ".join(damage[:3]))
    return read(folder)


def faults(folder: Path, wanted: Mapping[str, FileFacts]) -> list[str]:
    """What is wrong with some files of `folder`, a line each; empty where all are as they were written."""
    results = {name: _fault(folder / name, facts) for name, facts in wanted.items()}
    return [f"{name} {fault}" for name, fault in results.items() if fault]


def _fault(path: Path, wanted: FileFacts) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "cannot be read: it is no file"  # a pipe would be waited on
        if status.st_size != wanted.size:
            return f"has {status.st_size} bytes, not {wanted.size}"
        return "" if FileFacts.of(path) == wanted else "has another content than was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
