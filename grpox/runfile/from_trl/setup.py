"""Settings of a setup for GRPOTrainer, and the reader of YAML files for `trl grpo --config`."""

from __future__ import annotations

import ast
import os.path
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, nearest
from grpox.runfile.from_trl.fields import FIELDS, TRL_REWARDS, Verdict
from grpox.runfile.yaml_lines import read_yaml

OVERLONG = "get_soft_overlong_punishment"
JUDGED_BY_MATH = str(TRL_REWARDS["accuracy_reward"]["note"])
_OVERLONG_OF_TRL = {"max_completion_len": 1280, "soft_punish_cache": 256}
_TRUTHS = {"yes": True, "on": True, "no": False, "off": False}
"""Truth values of YAML 1.1, which `trl` reads; in YAML 1.2 they are text."""


@dataclass(frozen=True)
class TrlValue:
    """A value of the setup, or its expression if it is not a literal."""

    value: Any
    line: int | None = None
    literal: bool = True

    @property
    def shown(self) -> str:
        """Write the value as Python does, or the expression."""
        return repr(self.value) if self.literal else str(self.value)


def unread(node: ast.expr, before: str = "") -> TrlValue:
    """Wrap an expression that is not a literal, on one line."""
    return TrlValue(before + code(node), node.lineno, literal=False)


def code(node: ast.AST) -> str:
    """Write an expression on one line."""
    return " ".join(ast.unparse(node).split())


@dataclass(frozen=True)
class Reference:
    """One reward function of `reward_funcs`, tool or class of environments."""

    entry: dict[str, Any] | None
    """Its entry in a run file, with an absolute `path`; None if a run file cannot name it."""
    shown: str
    line: int | None = None
    note: str = ""
    """Difference from TRL; if there is no entry, the remedy."""


REWARDS_OF_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    OVERLONG: (
        {"name": "soft_overlong", "max_length": None, "buffer": None},
        {"max_completion_len": None, "soft_punish_cache": None},
    ),
    "get_cosine_scaled_reward": (
        {"name": "cosine", "max_length": None, "correct_by": "math", "column": "solution"},
        {
            "max_len": None,
            "min_value_wrong": -1.0,
            "max_value_wrong": -0.5,
            "min_value_correct": 0.5,
            "max_value_correct": 1.0,
        },
    ),
    "get_repetition_penalty_reward": (
        {"name": "repetition", "size": 3, "unit": "tokens"},
        {"ngram_size": 3, "max_penalty": -1.0},
    ),
}
"""Function of TRL that returns a reward function -> entry of a run file, and TRL's parameters with defaults."""
_OURS = {"max_completion_len": "max_length", "soft_punish_cache": "buffer", "max_len": "max_length"}
_OURS |= {"ngram_size": "size", "max_penalty": "weight"}


def entry_of_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the entry for a call of a function of `REWARDS_OF_CALLS`.

    Raises:
        KeyError, TypeError: the arguments do not fit the function.
    """
    entry, defaults = REWARDS_OF_CALLS[name]
    entry = entry | {_OURS.get(key, key): value for key, value in arguments.items() if value != defaults[key]}
    if None in entry.values():
        raise TypeError("an argument is missing")
    return entry | ({"weight": -entry["weight"]} if "weight" in entry else {})


def of_module(
    module: str, name: str, shown: str, line: int | None, folder: Path, home: str = "rewards.py"
) -> Reference:
    """Refer to a function of a module: TRL's, a file's in or below `folder`, or an installed module's.

    Args:
        home: file in which the user should write what a run file cannot name.
    """
    if module in ("trl", "trl.rewards") and name in TRL_REWARDS:
        return Reference(shown=name, line=line, **TRL_REWARDS[name])
    if module in ("trl", "trl.rewards") and home == "rewards.py":
        return Reference(None, name, line, f"not a reward of TRL: write it in {home}, and name `{home}:{name}`")
    if name and all(part.isidentifier() for part in module.lstrip(".").split(".")):
        file = folder.joinpath(*module.lstrip(".").split(".")).with_suffix(".py")
        if os.path.isfile(file):
            return Reference({"path": f"{file}:{name}"}, shown, line)
    note = f"write a file {home} with `from {module} import {name}`, and name `{home}:{name}`"
    return Reference(None, shown, line, note)


@dataclass
class TrlData:
    """A dataset with the names that `load_dataset` uses."""

    path: str | None = None
    subset: str | None = None
    split: str | None = None
    streaming: bool = False
    line: int | None = None
    problem: str = ""
    """Reason why a run file cannot name the dataset, and the remedy."""

    @property
    def shown(self) -> str:
        return str(self.path or "")


@dataclass
class Setup:
    """The settings of a script or YAML file."""

    source: str
    """Name of the file as the user wrote it."""
    fields: dict[str, TrlValue] = field(default_factory=dict)
    """Fields of GRPOConfig and `trl grpo`, in the order of the file."""
    arguments: dict[str, TrlValue] = field(default_factory=dict)
    """Arguments of GRPOTrainer, except the fields below; `images` is the place where a script uses a column."""
    model: TrlValue | None = None
    """Model folder or hub id."""
    model_options: dict[str, TrlValue] = field(default_factory=dict)
    """Arguments of `from_pretrained`, if the script itself loads the model."""
    rewards: list[Reference] | TrlValue | None = None
    """Reward functions; `TrlValue` if they are not a readable list."""
    tools: list[Reference] | TrlValue | None = None
    """Functions that the model may call; `TrlValue` if they are not a readable list."""
    environments: dict[str, Reference] | TrlValue | None = None
    """Value of the column `environment` -> class of environments; a single one, for all rows, under ``""``."""
    has_get_reward: bool = False
    """True if a class of environments has `get_reward`, or may have it where the script does not show it."""
    data: TrlData | None = None
    has_lora_config: bool = False
    """True if `peft_config` is a LoraConfig whose arguments are among `fields`, as `peft_config.r`."""
    statements: list[tuple[TrlValue, Verdict, str]] = field(default_factory=list)
    """Further statements of a script, their outcome, and the reason or cure."""
    home: Path = field(default_factory=Path)
    """Folder against which TRL resolves relative paths: the working directory."""


def read_trl_yaml(text: str, source: str) -> Setup:
    """Read the settings of a YAML file of `trl grpo`.

    Raises:
        ConfigError: the file is not YAML, or has no field of GRPOConfig.
    """
    document = read_yaml(text, source)
    data = document.data
    if not isinstance(data, dict):
        raise ConfigError("is not a mapping of fields such as model_name_or_path", where=source)
    if data.keys() >= {"model", "data", "rewards"}:
        raise ConfigError(
            "is already a run file of grpox", where=source, allowed="check it with `grpox validate`"
        )
    if not data.keys() & FIELDS.keys():
        near = next(filter(None, (nearest(name, FIELDS) for name in data)), "")
        what, allowed = "has no field of GRPOConfig or `trl grpo`", "the fields in docs/from-trl.md"
        raise ConfigError(what, "", source, ", ".join(data), allowed, near)
    fields = {}
    for name, value in data.items():
        if isinstance(value, str) and name in FIELDS and isinstance(FIELDS[name].default, bool):
            value = _TRUTHS.get(value.lower(), value)
        fields[name] = TrlValue(value, document.lines.get(name))
    model = fields.get("model_name_or_path")
    return Setup(source, fields, model=model, rewards=_rewards(fields), data=_data(fields))


def _rewards(fields: dict[str, TrlValue]) -> list[Reference] | None:
    """List the rewards in TRL's order: the reward model before the functions."""
    rewards = []
    if (model := fields.get("reward_model_name_or_path")) and model.value:
        entry = {"name": "reward_model", "model": str(model.value)}
        rewards.append(Reference(entry, model.shown, model.line))
    if (given := fields.get("reward_funcs")) and given.value:
        for name in map(str, given.value if isinstance(given.value, list) else [given.value]):
            # A name of TRL's own, or the dotted path of a function.
            module, dot, function = name.rpartition(".")
            reward = of_module(module if dot else "trl.rewards", function, name, given.line, Path())
            if name == OVERLONG:
                note = "with the lengths that `trl grpo` uses"
                reward = Reference(entry_of_call(name, _OVERLONG_OF_TRL), name, given.line, note)
            rewards.append(reward)
    return rewards or None


def _data(fields: dict[str, TrlValue]) -> TrlData | None:
    of = {name: given.value for name, given in fields.items()}
    if mixture := of.get("datasets"):
        # A list of datasets; a run file can have only one.
        line, only = fields["datasets"].line, mixture[0] if isinstance(mixture, list) else None
        known = isinstance(only, dict) and only.keys() <= {"path", "name", "split"} and "path" in only
        if only is None or not known or len(mixture) > 1:
            what = "write the rows of the mixture to a file and name the file: a run file has one dataset"
            return TrlData(line=line, problem=what)
        path, subset, split = only["path"], only.get("name"), only.get("split")
        return TrlData(str(path), subset, split, of.get("streaming") is True, line)
    if not (path := of.get("dataset_name")):
        return None
    subset, split = of.get("dataset_config"), of.get("dataset_train_split")
    line = fields["dataset_name"].line
    return TrlData(str(path), subset, split, of.get("dataset_streaming") is True, line)
