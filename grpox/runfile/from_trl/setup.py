"""What was read of a set-up for GRPOTrainer, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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


def unread(source: str, line: int | None) -> Given:
    """What is no literal: its expression, on one line."""
    return Given(" ".join(source.split()), line, literal=False)


@dataclass(frozen=True)
class RewardGiven:
    """One of `reward_funcs`: what a run file can name, or what it cannot."""

    entry: dict[str, Any] | None
    """An entry of `rewards`, its `path` absolute; None where it is not known."""
    shown: str
    line: int | None = None
    note: str = ""
    """What differs from TRL, or what to do where there is no entry."""


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
