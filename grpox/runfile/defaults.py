"""The defaults of a run file whose components are known: of the schema, and of each component's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from grpox.config import RewardRef, RunConfig, Section
from grpox.errors import ConfigError
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.runfile.slots import SLOTS

_REWARD = re.compile(r"rewards\.\d+")
_OBSERVER = re.compile(r"tracking\.[^.]+")


def parameter_defaults(
    params: Mapping[str, str], registry: Registry | None = None
) -> dict[str, Mapping[str, Any]]:
    """Collect the defaults that go with the parameters of a run.

    Args:
        params: dotted key -> value, as text; they say which components the run has.
        registry: default: of what is installed. Of a component that it lacks, nothing is known.

    Returns:
        Prefix of dotted keys, such as ``""``, ``"train."`` or ``"rewards.0."`` -> the defaults below it. Keys
        that must be given are left out; a later prefix wins.
    """
    registry = registry or Registry(discover())
    found: dict[str, Mapping[str, Any]] = {"": _dumped(RunConfig)}
    for name, field in RunConfig.model_fields.items():
        for member in (field.annotation, *get_args(field.annotation)):
            if isinstance(member, type) and issubclass(member, Section):
                found[f"{name}."] = _dumped(member)
    for key, kind in _slots(params):
        defaults = _dumped(RewardRef) if kind == "reward" else {}
        name = key.rpartition(".")[2] if kind == "observer" else params.get(f"{key}.name", "None")
        defaults |= _of_component(registry, kind, name)
        if params.get(f"{key}.path", "None") != "None":
            # Named by its path: that it has no name is no change.
            defaults["name"] = None
        found[f"{key}."] = defaults
    return found


def _slots(params: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(dotted key, kind) of every component that a run may have."""
    yield from SLOTS.items()
    for kind, pattern in (("reward", _REWARD), ("observer", _OBSERVER)):
        yield from ((key, kind) for key in dict.fromkeys(m[0] for m in map(pattern.match, params) if m))


def _of_component(registry: Registry, kind: str, name: str) -> dict[str, Any]:
    """The defaults of a component's own parameters; none of one that is not to be had here."""
    if name == "None":
        return {}
    try:
        model = registry.config_model(registry.find(kind, name))
    except ConfigError:
        return {}
    return {} if model is None else _dumped(model)


def _dumped(model: type[BaseModel]) -> dict[str, Any]:
    """The defaults of a model; keys that must be given are left out."""
    try:
        return model.model_construct().model_dump(mode="json")
    except Exception:  # noqa: BLE001 - a plugin's own code; without it the run can be read all the same
        return {}
