"""What MODEL of a command line names: a model's folder, a hub id, a run's folder or one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.checkpoint.folders import checkpoints_in
from grpox.checkpoint.manifest import MANIFEST
from grpox.checkpoint.progress import PROGRESS, Progress
from grpox.errors import ConfigError, Problem
from grpox.runfile.model_options import runs_code

ARGUMENT = "MODEL"
FROM_CHECKPOINT = ("path", "dtype", "init")
"""Keys of the section `model` that a checkpoint tells: those that its weights were trained with."""


@dataclass(frozen=True)
class NamedModel:
    """A model, and how the section `model` of a run file would name it."""

    given: str
    keys: Mapping[str, Any]
    checkpoint: Path | None = None
    """Whose weights take the place of those that `keys` names."""
    code: tuple[str, ...] = ()
    """Arguments in `keys` by which code of others runs: a checkpoint alone does not decide that."""

    @property
    def overrides(self) -> list[str]:
        """The same as changes to a run file."""
        # What is JSON is YAML too.
        return [f"model.{key}={json.dumps(value)}" for key, value in self.keys.items()]


def named_model(given: str) -> NamedModel:
    """What `given` names; whether a plain folder holds a model is seen when the run file is checked.

    Raises:
        ConfigError: it is a run's folder without a model, or a checkpoint that cannot be read.
    """
    folder = Path(given).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return NamedModel(given, {"path": given})
    if (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file():
        return _checkpoint(given, folder)
    if (folder / "model" / "config.json").is_file():
        return NamedModel(given, {"path": str(folder / "model")})
    if found := checkpoints_in(folder):
        what = "is the folder of a run that has no model yet"
        names = ", ".join(str(path) for path in found[:3])
        raise ConfigError(Problem(what, ARGUMENT, given=given, allowed=f"one of its checkpoints: {names}"))
    return NamedModel(given, {"path": given})


def _checkpoint(given: str, folder: Path) -> NamedModel:
    try:
        model = Progress.read(folder).config["model"]
        keys = {key: model[key] for key in FROM_CHECKPOINT}
        code = runs_code(keys["init"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(Problem(f"is a damaged checkpoint: {error}", ARGUMENT, given=given)) from error
    return NamedModel(given, keys, folder, tuple(code))
