"""The model and the run file of an evaluation; keys that only training needs are removed, and not checked.

MODEL on the command line names a model's folder, a hub id, a run's folder or one of its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.checkpoint.folders import FOLDER as CHECKPOINTS
from grpox.checkpoint.folders import MANIFEST, checkpoints_in
from grpox.checkpoint.progress import PROGRESS, Progress
from grpox.config.inputs import AUTO
from grpox.errors import ConfigError, Problem, nearest
from grpox.observing.record import recorded_choices
from grpox.runfile.load import ResolvedRun, read_run, resolve
from grpox.runfile.lock.differences import CHAT_DATE
from grpox.runfile.model_options import runs_code
from grpox.runfile.objects import RunObjects
from grpox.runfile.overrides import COMMAND_LINE

ARGUMENT = "MODEL"
CONFIG = "config.yaml"
FROM_CHECKPOINT = ("path", "dtype", "init", "longest_sequence")
"""Keys of the section `model` that are read from a checkpoint."""

TRUST = "model.init.trust_remote_code"
SECTIONS = (
    *("model", "data", "environment", "tools", "episodes", "rewards"),
    *("generator", "sampling", "evaluation", "plugins", "watchdog"),
)
"""Sections that take part in an evaluation."""
_OF_PROMPTS = ("prompt_column", "max_prompt_length", "long_prompts", "chat", "allow_special_tokens")
_OF_RUNS = ("every", "early_stop")
"""Keys of `evaluation` that matter only during a run."""


@dataclass(frozen=True)
class NamedModel:
    """A model, with the keys of the section `model` of a run file."""

    given: str
    keys: Mapping[str, Any]
    checkpoint: Path | None = None
    """A checkpoint whose weights replace those of `keys`."""
    code: tuple[str, ...] = ()
    """Arguments in `keys` that run code of others, for which a checkpoint is not enough."""


def named_model(given: str) -> NamedModel:
    """Return the model that MODEL names; a plain folder is checked later, with the run file.

    Raises:
        ConfigError: a run's folder has no model, or a checkpoint cannot be read.
    """
    folder = Path(given).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return NamedModel(given, {"path": given})
    if (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file():
        try:
            section = {"longest_sequence": AUTO} | Progress.read(folder).config["model"]
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


def own_config(given: str) -> str:
    """Return the config of the run that MODEL belongs to: a run's folder, its model or one of its checkpoints.

    Raises:
        ConfigError: MODEL does not belong to a run.
    """
    folder = Path(given).expanduser().absolute()
    of_run = folder.parent if folder.parent.name != CHECKPOINTS else folder.parents[1]
    for place in (folder, of_run):
        if (place / CONFIG).is_file():
            return str(place / CONFIG)
    what = "is not of a run, so a run file has to name the prompts" if folder.is_dir() else "no such folder"
    runs = [str(path.parent) for path in Path().glob(f"*/*/{CONFIG}")]
    allowed = f"grpox eval {given} CONFIG, or the folder of a run"
    raise ConfigError(what, ARGUMENT, given=given, allowed=allowed, nearest=nearest(given, runs))


def last_model(given: str) -> str:
    """Return MODEL; for the folder of a run that has no model yet, its newest checkpoint."""
    folder = Path(given).expanduser()
    if (folder / CONFIG).is_file() and not (folder / "model" / "config.json").is_file():
        return str(next(iter(checkpoints_in(folder)), given))
    return given


def load_evaluation(
    model: NamedModel, run: str | Path, overrides: Sequence[str] = (), world_size: int | None = None
) -> ResolvedRun:
    """Read, override and check the part of a run file or recipe for an evaluation of `model`.

    Args:
        overrides: ``a.b=c``, applied in order, after the model.
        world_size: number of ranks to check for; default: the ranks of this launch.

    Raises:
        ConfigError: one problem for each error.
    """
    what, allowed = "is no part of an evaluation", f"{', '.join(SECTIONS)}, train.seed"
    problems = [
        Problem(what, key, COMMAND_LINE, allowed=allowed, nearest=nearest(key.partition(".")[0], SECTIONS))
        for key in (override.partition("=")[0].strip() for override in overrides)
        if key and key != "train.seed" and key.partition(".")[0].partition("[")[0] not in SECTIONS
    ]
    if problems:
        raise ConfigError(problems)
    # A checkpoint alone does not allow a model's own code: the run file or an override must.
    said = read_run(run, overrides)[0].get("model") if model.code else None
    init = said.get("init") if isinstance(said, dict) else None
    if model.code and not (isinstance(init, dict) and init.get("trust_remote_code") is True):
        what = f"the checkpoint asks for {', '.join(model.code)}: that may run code which comes with its model"
        allowed = f"{TRUST}=true, where you trust {model.keys['path']}"
        raise ConfigError(what, TRUST, given=model.given, allowed=allowed)
    own = [f"model.{key}={json.dumps(value)}" for key, value in model.keys.items()]  # JSON is YAML too
    data, origin = read_run(run, [*own, *overrides])
    if isinstance(section := data.get("model"), dict) and section.get("chat_date", AUTO) == AUTO:
        with suppress(ConfigError, KeyError):  # of no run, or of one without a date
            section |= {"chat_date": recorded_choices(Path(own_config(model.given)).parent)[CHAT_DATE]}
    if data.get("evaluation") is None:
        what = "the run file has no evaluation, which names the prompts"
        allowed = (
            f"evaluation: {{path: held-out.jsonl}} in it, evaluation.path=held-out.jsonl on the command line, "
            f"or a CONFIG that has one: grpox eval {model.given} CONFIG"
        )
        raise ConfigError(what, "evaluation", origin.where("evaluation"), allowed=allowed)
    return resolve(_reduced(data), origin, str(run), RunObjects(), world_size, trains=False)


def _reduced(data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a run file for an evaluation; the schema refuses wrong types later."""
    reduced = {name: data[name] for name in SECTIONS if name in data}
    train, evaluation, model = data.get("train"), data["evaluation"], data.get("model")
    if isinstance(train, dict) and "seed" in train:
        reduced["train"] = {"seed": train["seed"]}
    if isinstance(evaluation, dict):
        reduced["evaluation"] = {key: value for key, value in evaluation.items() if key not in _OF_RUNS}
    if isinstance(model, dict):
        # Adapters are no part of the model.
        reduced["model"] = {key: value for key, value in model.items() if key != "lora"}
    if isinstance(data.get("data"), dict | None):
        prompts = {key: value for key, value in (data.get("data") or {}).items() if key in _OF_PROMPTS}
        # The schema requires training data, which is not read.
        path = evaluation.get("path") if isinstance(evaluation, dict) else None
        reduced["data"] = prompts | {"path": path if isinstance(path, str) else "none"}
    return reduced | {"tracking": {}}
