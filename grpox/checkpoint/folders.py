"""Where checkpoints are: ``checkpoints/step-00000050`` in the run's folder, under another name until whole."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from grpox.runtime.files import sync

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")


def folder_of(output_dir: Path, step: int) -> Path:
    """The checkpoint after `step` optimizer steps."""
    return output_dir / FOLDER / f"step-{step:08d}"


def unfinished_of(output_dir: Path, step: int) -> Path:
    """What it is called while it is written; whoever looks for checkpoints does not find it."""
    return output_dir / FOLDER / f".step-{step:08d}.unfinished"


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank keeps what the engine does not know of."""
    return folder / f"rank-{rank:05d}.pt"


def step_of(folder: Path) -> int:
    """Its optimizer steps, by its name."""
    found = _NAME.fullmatch(folder.name)
    if found is None:
        raise ValueError(f"{folder.name} is no checkpoint's name, such as step-00000050")
    return int(found[1])


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The checkpoints of a run's folder, newest first; whether they are good is another question."""
    parent = output_dir / FOLDER
    found = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def publish(unfinished: Path, folder: Path) -> None:
    """Give a checkpoint its name, on disk when this returns. One of that name that was there is replaced."""
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
