"""What was read of a set-up for GRPOTrainer, before anything is made of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpox.runfile.from_trl.fields import TRL_REWARDS

OVERLONG = "get_soft_overlong_punishment"


@dataclass(frozen=True)
class Given:
    """A value that the set-up gives, or what stands in its place where it is no literal."""

    value: Any
    line: int | None = None
    literal: bool = True

    @property
    def shown(self) -> str:
        """The value as Python writes it, or the expression that was not read."""
        return repr(self.value) if self.literal else str(self.value)


def unread(node: ast.expr, before: str = "") -> Given:
    """What is no literal: its expression, on one line."""
    return Given(before + code(node), node.lineno, literal=False)


def code(node: ast.AST) -> str:
    """The source of an expression, on one line."""
    return " ".join(ast.unparse(node).split())


@dataclass(frozen=True)
class RewardGiven:
    """One of `reward_funcs`: what a run file can name, or what it cannot."""

    entry: dict[str, Any] | None
    """An entry of `rewards`, its `path` absolute; None where it is not known."""
    shown: str
    line: int | None = None
    note: str = ""
    """What differs from TRL, or what to do where there is no entry."""


def of_model(path: str, shown: str, line: int | None) -> RewardGiven:
    """A model's name among `reward_funcs`."""
    return RewardGiven({"name": "reward_model", "model": path}, shown, line)


def of_overlong(max_completion_len: Any, soft_punish_cache: Any) -> dict[str, Any]:
    """The entry that does what TRL's get_soft_overlong_punishment does."""
    return {"name": "soft_overlong", "max_length": max_completion_len, "buffer": soft_punish_cache}


def of_module(module: str, name: str, shown: str, line: int | None, folder: Path) -> RewardGiven:
    """A function by its module: one of TRL's, one of a file in or below `folder`, or one to be imported."""
    if module in ("trl", "trl.rewards") and name in TRL_REWARDS:
        return RewardGiven(shown=name, line=line, **TRL_REWARDS[name])
    if module in ("trl", "trl.rewards"):
        module, shown = "trl.rewards", name
    elif name and (file := _module_file(folder, module.lstrip("."))) is not None:
        return RewardGiven({"path": f"{file}:{name}"}, shown, line)
    note = f"write a file rewards.py with `from {module} import {name}`, and name `rewards.py:{name}`"
    return RewardGiven(None, shown, line, note)


def _module_file(folder: Path, module: str) -> Path | None:
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    file = folder.joinpath(*parts).with_suffix(".py")
    try:
        return file if file.is_file() else None
    except OSError:  # longer than a name can be
        return None


@dataclass
class DataGiven:
    """A dataset as `load_dataset` names it."""

    path: str | None = None
    subset: str | None = None
    split: str | None = None
    streaming: bool = False
    line: int | None = None
    problem: str = ""
    """Why a run file cannot name it as it is, and what to do."""

    @property
    def shown(self) -> str:
        return str(self.path or "")


@dataclass
class Setup:
    """A script or YAML file, read."""

    source: str
    """As the user named it."""
    fields: dict[str, Given] = field(default_factory=dict)
    """Of GRPOConfig and `trl grpo`, in the order of the file."""
    arguments: dict[str, Given] = field(default_factory=dict)
    """Of GRPOTrainer, but for those below."""
    model: Given | None = None
    """A folder or hub id."""
    model_options: dict[str, Given] = field(default_factory=dict)
    """Arguments of `from_pretrained`, where the script itself loads the model."""
    rewards: list[RewardGiven] | Given | None = None
    """A `Given` where it is no list that can be read."""
    data: DataGiven | None = None
    evaluation: Given | None = None
    """What `eval_dataset` is."""
    has_lora_config: bool = False
    """Tell whether `peft_config` is a LoraConfig whose arguments are among `fields`, as `peft_config.r`."""
    home: Path = field(default_factory=Path)
    """The folder against which TRL resolves relative paths: the working directory."""
