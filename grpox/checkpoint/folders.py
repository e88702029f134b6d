"""A checkpoint's folder: ``checkpoints/step-00000050`` in the run's, under another name until it is whole.

Its manifest holds size and hash of each file. The hash is XXH3 (128 bits), which finds damage by a disk as
quickly as the disk reads. A cryptographic hash adds nothing: whoever changes files can change the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from xxhash import xxh3_128

from grpox.runtime.files import open_regular, parse_json, read_small, sync

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 4
"""Version of the layout of a checkpoint."""
_NAME = re.compile(r"step-\d{8,}")

Content = TypeVar("Content")


def folder_of(output_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps."""
    return output_dir / FOLDER / f"step-{step:08d}"


def unfinished_of(folder: Path) -> Path:
    """Return the name of a folder while it is written, which is not a checkpoint's."""
    return folder.with_name(f".{folder.name}.unfinished")


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's own state."""
    return folder / f"rank-{rank:05d}.pt"


def step_of(folder: Path) -> int:
    """Return the optimizer steps in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def checkpoints_in(output_dir: Path) -> list[Path]:
    """List the checkpoints of a run's folder, newest first, damaged ones included."""
    parent = output_dir / FOLDER
    folders = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(folders, key=step_of, reverse=True)


def publish(folder: Path) -> None:
    """Rename the finished folder to `folder`, which is replaced, and flush it to disk."""
    unfinished = unfinished_of(folder)
    for path in (p for p in (unfinished, *unfinished.rglob("*")) if p.is_dir()):
        sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    sync(folder.parent)


def clear_unfinished(output_dir: Path) -> None:
    """Remove checkpoints that runs were killed while writing."""
    for path in (output_dir / FOLDER).glob(".step-*.unfinished"):
        shutil.rmtree(path)


@dataclass(frozen=True)
class FileFacts:
    """Size and hash of a file."""

    size: int
    """Bytes."""
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Compute them for a file."""
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, xxh3_128).hexdigest()  # type: ignore[arg-type]
            return cls(file.tell(), digest)


class Hashed:
    """A file that is hashed while it is written, from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._size, self.flush = file, xxh3_128(), 0, file.flush

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._size += len(data)
        return self._file.write(data)

    @property
    def facts(self) -> FileFacts:
        """Size and hash of the data so far."""
        return FileFacts(self._size, self._hash.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Write a small file and flush it to disk."""
    path.write_text(text + "\n", encoding="utf-8")
    sync(path)


def write_manifest(folder: Path, known: Mapping[str, FileFacts] | None = None) -> None:
    """Write the manifest of all files below `folder` and flush it to disk.

    Args:
        known: relative path -> facts of files that were hashed while they were written.
    """
    files = dict(known or {})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and name not in files:
            files[name] = FileFacts.of(path)
    content = {"format": FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_text(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> dict[str, FileFacts]:
    """Read the manifest of a checkpoint.

    Raises:
        ValueError: the manifest is missing, cannot be read or names no files.
    """
    try:
        content = parse_json(read_small(folder / MANIFEST))
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
    """Return the result of `read` for a folder whose files all match the manifest.

    Raises:
        ValueError: some do not match, or `read` raises it.
    """
    if damage := faults(folder, read_manifest(folder)):
        raise ValueError("; ".join(damage[:3]))
    return read(folder)


def faults(folder: Path, wanted: Mapping[str, FileFacts]) -> list[str]:
    """Return a line for each damaged or missing file of `folder`."""
    damage = []
    for name, facts in wanted.items():
        try:
            now = FileFacts.of(folder / name)
            if now.size != facts.size:
                damage.append(f"{name} has {now.size} bytes, not {facts.size}")
            elif now != facts:
                damage.append(f"{name} has another content than was written")
        except FileNotFoundError:
            damage.append(f"{name} is missing")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
    return damage
