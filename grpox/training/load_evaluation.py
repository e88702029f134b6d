"""The model and the run file of an evaluation: what only training needs is left out, and not checked.

MODEL of a command line names a model's folder, a hub id, a run's folder or one of its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.checkpoint.folders import MANIFEST, checkpoints_in
from grpox.checkpoint.progress import PROGRESS, Progress
from grpox.errors import ConfigError, Problem, nearest
from grpox.runfile.given import Given
from grpox.runfile.load import ResolvedRun, read_run, resolve
from grpox.runfile.model_options import runs_code
from grpox.runfile.overrides import COMMAND_LINE

ARGUMENT = "MODEL"
FROM_CHECKPOINT = ("path", "dtype", "init")
"""Keys of the section `model` that a checkpoint tells: those that its weights were trained with."""

TRUST = "model.init.trust_remote_code"
SECTIONS = ("model", "data", "rewards", "generator", "sampling", "evaluation", "plugins", "watchdog")
"""What takes part in an evaluation."""
_OF_PROMPTS = ("prompt_column", "max_prompt_length", "long_prompts")
_OF_RUNS = ("every", "early_stop")
"""Keys of `evaluation` that say when, during a run."""


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
        try:
            section = Progress.read(folder).config["model"]
            keys = {key: section[key] for key in FROM_CHECKPOINT}
            return NamedModel(given, keys, folder, tuple(runs_code(keys["init"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"is a damaged checkpoint: {error}", ARGUMENT, given=given) from error
    if (folder / "model" / "config.json").is_file():
        return NamedModel(given, {"path": str(folder / "model")})
    if checkpoints := checkpoints_in(folder):
        what = "is the folder of a run that has no model yet"
        names = ", ".join(str(path) for path in checkpoints[:3])
        raise ConfigError(what, ARGUMENT, given=given, allowed=f"one of its checkpoints: {names}")
    return NamedModel(given, {"path": given})


def load_evaluation(
    model: NamedModel, run: str | Path, overrides: Sequence[str] = (), world_size: int | None = None
) -> ResolvedRun:
    """Read, override and check what an evaluation of `model` takes from a run file or bundled recipe.

    Args:
        overrides: ``a.b=c``, applied in order, after the model.
        world_size: ranks to check for; default: those of this launch.

    Raises:
        ConfigError: with every problem found.
    """
    problems = [
        Problem(
            "is no part of an evaluation",
            key,
            COMMAND_LINE,
            allowed=f"{', '.join(SECTIONS)}, train.seed",
            nearest=nearest(key.partition(".")[0], SECTIONS),
        )
        for key in (override.partition("=")[0].strip() for override in overrides)
        if key and key != "train.seed" and key.partition(".")[0].partition("[")[0] not in SECTIONS
    ]
    if problems:
        raise ConfigError(problems)
    if model.code and not _trusts_code(run, overrides):
        what = f"the checkpoint asks for {', '.join(model.code)}: that may run code which comes with its model"
        allowed = f"{TRUST}=true, where you trust {model.keys['path']}"
        raise ConfigError(what, TRUST, given=model.given, allowed=allowed)
    data, origin = read_run(run, [*model.overrides, *overrides])
    if data.get("evaluation") is None:
        what = "the run file has no evaluation, which names the prompts"
        allowed = "evaluation: {path: held-out.jsonl}"
        raise ConfigError(what, "evaluation", origin.where("evaluation"), allowed=allowed)
    return resolve(_reduced(data), origin, str(run), Given(), world_size, trains=False)


def _trusts_code(run: str | Path, overrides: Sequence[str]) -> bool:
    """Whether the run file or an override allows the code of a model: a checkpoint does not decide that."""
    said, _ = read_run(run, overrides)
    init = said["model"].get("init") if isinstance(said.get("model"), dict) else None
    return isinstance(init, dict) and init.get("trust_remote_code") is True


def _reduced(data: dict[str, Any]) -> dict[str, Any]:
    """Those parts of a run file that take part; what is no mapping is left for the schema to refuse."""
    reduced = {name: data[name] for name in SECTIONS if name in data}
    train, evaluation, model = data.get("train"), data["evaluation"], data.get("model")
    if isinstance(train, dict) and "seed" in train:
        reduced["train"] = {"seed": train["seed"]}
    if isinstance(evaluation, dict):
        reduced["evaluation"] = {key: value for key, value in evaluation.items() if key not in _OF_RUNS}
    if isinstance(model, dict):
        # What is trained of a model is no part of it.
        reduced["model"] = {key: value for key, value in model.items() if key != "lora"}
    if isinstance(data.get("data"), dict | None):
        prompts = {key: value for key, value in (data.get("data") or {}).items() if key in _OF_PROMPTS}
        # A run needs training data; nobody reads it here.
        path = evaluation.get("path") if isinstance(evaluation, dict) else None
        reduced["data"] = prompts | {"path": path if isinstance(path, str) else "none"}
    return reduced | {"tracking": {}}
