"""The parameters of tracked runs: which differ from the defaults, and which between runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from grpox.cli.runs_tracked import TrackedRun
from grpox.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from grpox.plugins.registry import Registry

OF_RUN = "run."
"""Begins what is no key of a run file: ranks and steps."""
_REWARD = re.compile(r"rewards\.\d+")
_OBSERVER = re.compile(r"tracking\.[^.]+")


def changed_params(params: Mapping[str, str], registry: Registry) -> dict[str, str]:
    """Those that are not what an empty run file would have, as text; keys without a default among them.

    Args:
        params: dotted key -> value, as the plugin for MLflow writes them.
        registry: of what is installed now; of a component that it lacks, every parameter counts as changed.
    """
    defaults = _defaults(params, registry)
    return {
        key: value
        for key, value in params.items()
        if not key.startswith(OF_RUN) and not (key in defaults and same(value, defaults[key]))
    }


def differing_params(runs: Sequence[TrackedRun]) -> dict[str, list[str | None]]:
    """Key -> the value of each run, of keys whose values are not all the same; None where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.params)
    rows = {key: [run.params.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if not all(same(values[0], value) for value in values)}


def same(one: str | None, other: str | None) -> bool:
    """Whether two values are equal, as numbers where they are: a run file may have 1 for 1.0."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def _defaults(params: Mapping[str, str], registry: Registry) -> dict[str, str]:
    """Dotted key -> the default as text, of the schema and of the components that `params` names."""
    from grpox.config import RewardRef, RunConfig, Section

    found = dict(_dumped(RunConfig, ""))
    for name, field in RunConfig.model_fields.items():
        for member in (field.annotation, *get_args(field.annotation)):
            if isinstance(member, type) and issubclass(member, Section):
                found |= _dumped(member, f"{name}.")
    for key, kind in _slots(params):
        if kind == "reward":
            found |= _dumped(RewardRef, f"{key}.")
        name = key.rpartition(".")[2] if kind == "observer" else params.get(f"{key}.name", "None")
        found |= _of_component(registry, kind, name, f"{key}.")
        if params.get(f"{key}.path", "None") != "None":
            # Named by its path: that it has no name is no change.
            found[f"{key}.name"] = "None"
    return found


def _slots(params: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(dotted key, kind) of every component that a run may have."""
    from grpox.runfile.slots import SLOTS

    yield from SLOTS.items()
    for kind, pattern in (("reward", _REWARD), ("observer", _OBSERVER)):
        yield from ((key, kind) for key in dict.fromkeys(m[0] for m in map(pattern.match, params) if m))


def _of_component(registry: Registry, kind: str, name: str, prefix: str) -> dict[str, str]:
    """The defaults of a component's own parameters; none of one that is not to be had here."""
    if name == "None":
        return {}
    try:
        model = registry.config_model(registry.find(kind, name))
    except ConfigError:
        return {}
    return {} if model is None else _dumped(model, prefix)


def _dumped(model: type[BaseModel], prefix: str) -> dict[str, str]:
    """The defaults of a model, flattened as parameters are; keys that must be given are left out."""
    from grpox_mlflow.naming import flattened

    try:
        defaults = model.model_construct().model_dump(mode="json")
    except Exception:  # noqa: BLE001 - a plugin's own code; without it the run can be read all the same
        return {}
    return dict(flattened(defaults, prefix))
