"""Reads the YAML file of `trl grpo --config`: fields of GRPOConfig beside model, dataset and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem, nearest
from grpox.runfile.from_trl.fields import FIELDS
from grpox.runfile.from_trl.setup import (
    OVERLONG,
    DataGiven,
    Given,
    RewardGiven,
    Setup,
    of_model,
    of_module,
    of_overlong,
)
from grpox.runfile.yaml_lines import read_yaml

_TRUTHS = {"yes": True, "on": True, "no": False, "off": False}
"""What `trl`, which reads YAML 1.1, takes for a truth value; YAML 1.2 takes it for text."""


def read_trl_yaml(text: str, source: str) -> Setup:
    """What the file gives.

    Raises:
        ConfigError: it is no YAML, or has nothing to do with GRPO.
    """
    document = read_yaml(text, source)
    data = document.data
    if not isinstance(data, dict):
        raise ConfigError(Problem("is no mapping of fields such as model_name_or_path", where=source))
    if data.keys() >= {"model", "data", "rewards"}:
        what = "is a run file of grpox already"
        raise ConfigError(Problem(what, where=source, allowed="`grpox validate` it"))
    if not data.keys() & FIELDS.keys():
        near = next(filter(None, (nearest(name, FIELDS) for name in data)), "")
        what, allowed = "has no field of GRPOConfig or `trl grpo`", "those of docs/from-trl.md"
        raise ConfigError(Problem(what, "", source, ", ".join(data), allowed, near))
    fields = {name: Given(_value(name, value), document.lines.get(name)) for name, value in data.items()}
    model = fields.get("model_name_or_path")
    return Setup(source, fields, model=model, rewards=_rewards(fields), data=_data(fields))


def _value(name: str, value: Any) -> Any:
    truth = isinstance(value, str) and name in FIELDS and isinstance(FIELDS[name].default, bool)
    return _TRUTHS.get(value.lower(), value) if truth else value


def _rewards(fields: dict[str, Given]) -> list[RewardGiven] | None:
    """In TRL's order: the reward model before the functions."""
    found = []
    if (model := fields.get("reward_model_name_or_path")) and model.value:
        found.append(of_model(str(model.value), model.shown, model.line))
    if (given := fields.get("reward_funcs")) and given.value:
        names = given.value if isinstance(given.value, list) else [given.value]
        found += [_reward(str(name), given.line) for name in names]
    return found or None


def _reward(name: str, line: int | None) -> RewardGiven:
    """One of `reward_funcs`: a name of TRL's own, or the dotted path of a function."""
    if name == OVERLONG:
        return RewardGiven(of_overlong(1280, 256), name, line, "with the lengths that `trl grpo` uses")
    module, dot, function = name.rpartition(".")
    return of_module(module if dot else "trl.rewards", function, name, line, Path())


def _data(fields: dict[str, Given]) -> DataGiven | None:
    of = {name: given.value for name, given in fields.items()}
    if mixture := of.get("datasets"):
        # A list of datasets, of which a run file can have one.
        line, only = fields["datasets"].line, mixture[0] if isinstance(mixture, list) else None
        known = isinstance(only, dict) and only.keys() <= {"path", "name", "split"} and "path" in only
        if only is None or not known or len(mixture) > 1:
            what = "a run file names one dataset, whole: write the rows of the mixture to a file, and name that"
            return DataGiven(line=line, problem=what)
        return DataGiven(
            str(only["path"]), only.get("name"), only.get("split"), of.get("streaming") is True, line
        )
    if not (path := of.get("dataset_name")):
        return None
    subset, split, streams = (
        of.get("dataset_config"),
        of.get("dataset_train_split"),
        of.get("dataset_streaming"),
    )
    return DataGiven(str(path), subset, split, streams is True, fields["dataset_name"].line)
