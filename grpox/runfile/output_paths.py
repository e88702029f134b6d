"""Checks of where a run writes: output_dir, which must not hold its own inputs, and the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from grpox.config import HubConfig, RunConfig
from grpox.errors import Problem

SET_ASIDE = ("model", "completions")
"""Folders in output_dir whose earlier content a run moves to ``earlier/``."""


def unreachable(path: Path) -> str:
    """Why nobody can say whether `path` exists: too long a name, a loop of links; empty if one can."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def output_problems(config: RunConfig) -> list[Problem]:
    """What is wrong with `output_dir`; the input paths of `config` are resolved."""
    if not config.output_dir.strip():
        return [Problem("is empty", key="output_dir", given=repr(config.output_dir), allowed="a folder")]
    folder = Path(config.output_dir).absolute()
    if reason := unreachable(folder):
        return [Problem(f"cannot be made: {reason}", key="output_dir", given=config.output_dir)]
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        what = "is a file, not a folder" if there == folder else f"cannot be made: {there} is a file"
        return [Problem(what, key="output_dir", given=config.output_dir)]
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"cannot be written: no permission to write in {there}"
        return [Problem(what, key="output_dir", given=config.output_dir)]
    return _inputs_in_the_way(config, folder.resolve())


def _inputs_in_the_way(config: RunConfig, folder: Path) -> list[Problem]:
    inputs = {"model.path": config.model.path, "data.path": config.data.path}
    if config.evaluation is not None:
        inputs["evaluation.path"] = config.evaluation.path
    return [
        Problem(
            f"lies in {name}/ of output_dir, which the run replaces by its own",
            key=key,
            given=path,
            allowed="another output_dir, or a copy of this input elsewhere",
        )
        for key, path in inputs.items()
        for name in SET_ASIDE
        if path is not None and Path(path).is_absolute() and Path(path).is_relative_to(folder / name)
    ]


def hub_problems(config: HubConfig | None) -> Iterator[Problem]:
    """A repository name or branch that the hub would refuse after the training."""
    if config is None:
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(config.repo)
        if "/" not in config.repo:
            yield Problem("names no owner", "hub.repo", given=config.repo, allowed="user/name")
    except HFValidationError as error:
        what = str(error).split(":")[0].rstrip(".")
        yield Problem(what, "hub.repo", given=config.repo, allowed="user/name")
    if config.revision is not None and (not config.revision or config.revision.isspace()):
        yield Problem("is empty", "hub.revision", allowed="a branch's name, or null")
