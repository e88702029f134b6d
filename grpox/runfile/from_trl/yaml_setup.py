"""Reads the YAML file of `trl grpo --config`: fields of GRPOConfig beside model, dataset and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, Problem, nearest
from grpox.runfile.from_trl.fields import FIELDS
from grpox.runfile.from_trl.reward_names import OVERLONG, by_import, module_file, of_trl, overlong, reward_model
from grpox.runfile.from_trl.setup import DataGiven, Given, RewardGiven, Setup
from grpox.runfile.yaml_lines import read_yaml

_TRUTHS = {"yes": True, "on": True, "no": False, "off": False}
"""What `trl`, which reads YAML 1.1, takes for a truth value; YAML 1.2 takes it for text."""
_OURS = {"model", "data", "rewards"}


def read_trl_yaml(text: str, source: str) -> Setup:
    """What the file gives.

    Raises:
        ConfigError: it is no YAML, or has nothing to do with GRPO.
    """
    document = read_yaml(text, source)
    if not isinstance(document.data, dict):
        raise ConfigError(Problem("is no mapping of fields such as model_name_or_path", where=source))
    if document.data.keys() >= _OURS:
        raise ConfigError(
            Problem("is a run file of grpox already", where=source, allowed="`grpox validate` it")
        )
    if not document.data.keys() & FIELDS.keys():
        given = ", ".join(document.data)
        near = next(filter(None, (nearest(name, FIELDS) for name in document.data)), "")
        what = "has no field of GRPOConfig or `trl grpo`"
        raise ConfigError(
            Problem(what, where=source, given=given, allowed="those of docs/from-trl.md", nearest=near)
        )
    setup = Setup(source)
    setup.fields = {
        name: Given(_value(name, value), document.lines.get(name)) for name, value in document.data.items()
    }
    setup.model = setup.fields.get("model_name_or_path")
    setup.rewards = _rewards(setup.fields)
    setup.data = _data(setup.fields)
    return setup


def _value(name: str, value: Any) -> Any:
    truth = isinstance(value, str) and name in FIELDS and isinstance(FIELDS[name].default, bool)
    return _TRUTHS.get(value.lower(), value) if truth else value


def _rewards(fields: dict[str, Given]) -> list[RewardGiven] | None:
    """In TRL's order: the reward model before the functions."""
    found = []
    if (model := fields.get("reward_model_name_or_path")) and model.value:
        found.append(RewardGiven(reward_model(str(model.value)), model.shown, model.line))
    if (given := fields.get("reward_funcs")) and given.value:
        names = given.value if isinstance(given.value, list) else [given.value]
        found += [_reward(str(name), given.line) for name in names]
    return found or None


def _reward(name: str, line: int | None) -> RewardGiven:
    """One of `reward_funcs`: a name of TRL's own, or the dotted path of a function."""
    if name == OVERLONG:
        return RewardGiven(overlong(1280, 256), name, line, "with the lengths that `trl grpo` uses")
    module, dot, function = name.rpartition(".")
    if not dot:
        return of_trl(name, line)
    file = module_file(Path(), module)
    if file is not None:
        return RewardGiven({"path": f"{file}:{function}"}, name, line)
    return by_import(module, function, name, line)


def _data(fields: dict[str, Given]) -> DataGiven | None:
    def of(name: str) -> Any:
        return fields[name].value if name in fields else None

    if mixture := of("datasets"):
        return _mixture(mixture, fields["datasets"].line, of("streaming") is True)
    if not of("dataset_name"):
        return None
    return DataGiven(
        str(of("dataset_name")),
        of("dataset_config"),
        of("dataset_train_split"),
        of("dataset_streaming") is True,
        fields["dataset_name"].line,
    )


def _mixture(mixture: Any, line: int | None, streaming: bool) -> DataGiven:
    """`datasets`, of which a run file can have one."""
    only = mixture[0] if isinstance(mixture, list) and len(mixture) == 1 else None
    if not isinstance(only, dict) or only.keys() - {"path", "name", "split"} or "path" not in only:
        what = "a run file names one dataset, whole: write the rows of the mixture to a file, and name that"
        return DataGiven(line=line, problem=what)
    return DataGiven(str(only["path"]), only.get("name"), only.get("split"), streaming, line)
