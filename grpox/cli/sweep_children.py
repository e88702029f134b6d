"""The runs of a sweep: each with its settings, its folder and its checked config."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.cli.sweep_grid import Grid
from grpox.config import RunConfig
from grpox.errors import ConfigError, Problem
from grpox.observing.record import began
from grpox.runfile.load import load_run

LONGEST_NAME = 100
"""Characters of a run's folder; file systems take 255 bytes."""


@dataclass(frozen=True)
class Child:
    """One run of a sweep."""

    name: str
    """Of its folder, and of what it prints: ``learning_rate=1e-6_seed=0``."""
    setting: Mapping[str, str]
    """Key of an axis -> its value here, as it was typed."""
    overrides: tuple[str, ...]
    folder: Path
    config: RunConfig

    @property
    def log(self) -> Path:
        """What it printed; beside its folder, which it may move things out of."""
        return self.folder.with_name(f"{self.name}.log")

    def summary(self) -> dict[str, Any] | None:
        """What its ``summary.json`` holds, if it is complete and of this very config."""
        try:
            read: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return read if began(self.config) else None


def plan_children(run: str, grid: Grid, folder: Path | None, world_size: int) -> tuple[Path, list[Child]]:
    """The sweep's folder and its runs, every one of them checked as `grpox validate` would.

    Args:
        folder: default: the run's output_dir with ``-sweep`` behind it.
        world_size: ranks of each run.

    Raises:
        ConfigError: whatever is wrong with any of them, each problem once.
    """
    problems: dict[str, Problem] = {}
    names, configs = _names(grid), list[RunConfig]()
    first = load_run(run, grid.overrides(names[0][0]), world_size).config
    folder = folder or Path(f"{first.output_dir}-sweep")
    every = [(*grid.overrides(setting), f"output_dir={_text(str(folder / name))}") for setting, name in names]
    for overrides in every:
        try:
            configs.append(load_run(run, overrides, world_size).config)
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError(list(problems.values()))
    return folder, [
        Child(name, setting, overrides, folder / name, config)
        for (setting, name), overrides, config in zip(names, every, configs, strict=True)
    ]


def _text(value: str) -> str:
    """As YAML that reads it as this very text."""
    return json.dumps(value, ensure_ascii=False)


def _names(grid: Grid) -> list[tuple[Mapping[str, str], str]]:
    """Each setting with a name for its folder, which a value added to the grid later leaves as it is."""
    short = grid.names
    named = [(setting, _name({short[key]: setting[key] for key in setting})) for setting in grid.settings()]
    taken = [name for _, name in named]
    return [
        (setting, name if taken.count(name) == 1 else f"{name}-{_digest(grid.overrides(setting))}")
        for setting, name in named
    ]


def _name(values: Mapping[str, str]) -> str:
    """``loss=dapo_seed=1``: what file systems and shells take as it is."""
    cleaned = "_".join(f"{key}={_plain(value)}" for key, value in values.items())
    if len(cleaned) <= LONGEST_NAME:
        return cleaned
    return f"{cleaned[: LONGEST_NAME - 9]}-{_digest(list(values.values()))}"


def _plain(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value).strip("-.") or "empty"


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
