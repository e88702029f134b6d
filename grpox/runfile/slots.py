"""Slots, the keys of a run file that name components: kinds, selected components and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError

from grpox.config import ComponentRef, EnvironmentRef, RewardRef, RunConfig
from grpox.config.run import SECTIONS
from grpox.errors import ConfigError, Problem, join
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry

SLOTS = {
    "generator": "generator",
    "advantage": "advantage",
    "loss": "loss",
    "correction": "correction",
    "data.source": "dataset",
    "train.optimizer": "optimizer",
    "train.scheduler": "scheduler",
}
"""Dotted key -> component kind. Besides these, `environment` is one or a list, `rewards` and
`evaluation.rewards` list rewards, and `tracking` names observers."""
REFERENCES: Mapping[str, type[ComponentRef]] = {"reward": RewardRef, "environment": EnvironmentRef}
"""Component kind -> the model of its references, of kinds whose slots have keys of their own."""
LISTED = re.compile(r"(evaluation\.)?rewards\[\d+\]|environment(\[\d+\])?")
"""Slots of the kinds that a run may select several times."""


def is_slot(key: str) -> bool:
    """Return True if the dotted `key` of a run file names a component."""
    return key in SLOTS or LISTED.fullmatch(key) is not None


def default_name(key: str) -> str | None:
    """Return the default component of a slot, None if it has none."""
    field = RunConfig.model_fields.get(key)
    return field.default.name if field and isinstance(field.default, ComponentRef) else None


def selected(config: RunConfig) -> Iterator[tuple[str, str, ComponentRef]]:
    """Yield (key, kind, reference) of every component that `config` selects."""
    for key, kind in SLOTS.items():
        section, _, name = key.rpartition(".")
        reference = getattr(getattr(config, section) if section else config, name)
        if reference is not None:
            yield key, kind, reference
    for key, environment in config.environments.items():
        yield key, "environment", environment
    for index, reward in enumerate(config.rewards):
        yield f"rewards[{index}]", "reward", reward
    own = config.evaluation.rewards if config.evaluation is not None else None
    for index, reward in enumerate(own or ()):
        yield f"evaluation.rewards[{index}]", "reward", reward
    for name, params in config.tracking.items():
        mention = params if "path" in params else {**params, "name": name}
        yield f"tracking.{name}", "observer", ComponentRef.model_validate(mention)


def mentions(value: object, key: str = "") -> Iterator[tuple[str, str, ComponentRef]]:
    """Yield (key, kind, reference) of the components in data that may not fit the schema, where they do."""
    heading = re.fullmatch(r"tracking\.([^.]+)", key)
    if heading or key in SLOTS or (LISTED.fullmatch(key) and not isinstance(value, list)):
        if heading:
            params: Any = {} if value is None else value
            if not isinstance(params, dict) or "name" in params:
                return  # refused as it is
            value = params if "path" in params else {**params, "name": heading[1]}
        kind = SLOTS.get(key) or ("observer" if heading else "reward" if "rewards" in key else "environment")
        with suppress(ValidationError):
            yield key, kind, REFERENCES.get(kind, ComponentRef).model_validate(value)
    elif isinstance(value, Mapping | list):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from mentions(part, join(key, name))


def tracking_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Find observers with a `name`, which their heading already gives, or with a `path` that is not text."""
    tracking = data.get("tracking")
    for heading, params in tracking.items() if isinstance(tracking, Mapping) else ():
        if not isinstance(params, Mapping):
            continue  # empty, or refused by the schema
        if "name" in params:
            what = "remove this key: the heading is the observer's name; with `path`, any heading will do"
            yield Problem(what, key=f"tracking.{heading}.name", given=str(params["name"]))
        if not isinstance(path := params.get("path", ""), str):
            what, key = "should be a valid string", f"tracking.{heading}.path"
            yield Problem(what, key, given=str(path), allowed="path.py:name")


def parameter_defaults(
    params: Mapping[str, str], registry: Registry | None = None
) -> dict[str, Mapping[str, Any]]:
    """Collect the defaults that go with the parameters of a run.

    Args:
        params: dotted key -> value, as text; they name the components of the run.
        registry: default: all installed plugins. A component missing from it has no defaults.

    Returns:
        prefix of dotted keys, such as ``""``, ``"train."`` or ``"rewards.0."`` -> the defaults below it,
        without keys that must be given; a later prefix wins.
    """
    registry = registry or Registry(discover())
    by_prefix: dict[str, Mapping[str, Any]] = {"": _dumped(RunConfig)}
    by_prefix |= {f"{name}.": _dumped(section) for name, section in SECTIONS.items()}
    slots = dict(SLOTS)
    patterns = {
        "reward": r"rewards\.\d+",
        "environment": r"environment(\.\d+)?(?=\.)",
        "observer": r"tracking\.[^.]+",
    }
    for kind, pattern in patterns.items():
        slots |= {match[0]: kind for key in params if (match := re.match(pattern, key))}
    for key, kind in slots.items():
        defaults = _dumped(REFERENCES[kind]) if kind in REFERENCES else {}
        name = key.rpartition(".")[2] if kind == "observer" else params.get(f"{key}.name", "None")
        try:
            model = None if name == "None" else registry.config_model(registry.find(kind, name))
        except ConfigError:
            model = None
        defaults |= {} if model is None else _dumped(model)
        if params.get(f"{key}.path", "None") != "None":
            defaults["name"] = None  # as for a component given by path
        by_prefix[f"{key}."] = defaults
    return by_prefix


def _dumped(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a model, without keys that must be given."""
    try:
        return model.model_construct().model_dump(mode="json")
    except Exception:  # noqa: BLE001 - a plugin's own code; the run can be read without it
        return {}
