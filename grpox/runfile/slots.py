"""Where a run file names components: each slot's dotted key and the kind of component it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpox.config import ComponentRef, RunConfig
from grpox.errors import Problem

SLOTS = {
    "generator": "generator",
    "advantage": "advantage",
    "loss": "loss",
    "correction": "correction",
    "data.source": "dataset",
    "train.optimizer": "optimizer",
    "train.scheduler": "scheduler",
}
"""Dotted key -> component kind. Besides these, `rewards` and `evaluation.rewards` list rewards, and `tracking`
names observers."""


def is_slot(key: str) -> bool:
    """Whether a run file names a component under the dotted `key`, so that a bare name may stand there."""
    return key in SLOTS or re.fullmatch(r"(evaluation\.)?rewards\[\d+\]", key) is not None


def default_name(key: str) -> str | None:
    """The component in this slot of a run file that does not mention it."""
    field = RunConfig.model_fields.get(key)
    return field.default.name if field and isinstance(field.default, ComponentRef) else None


def selected(config: RunConfig) -> Iterator[tuple[str, str, ComponentRef]]:
    """(key, kind, reference) of every component that `config` selects."""
    for key, kind in SLOTS.items():
        section, _, name = key.rpartition(".")
        reference = getattr(getattr(config, section) if section else config, name)
        if reference is not None:
            yield key, kind, reference
    for index, reward in enumerate(config.rewards):
        yield f"rewards[{index}]", "reward", reward
    own = config.evaluation.rewards if config.evaluation is not None else None
    for index, reward in enumerate(own or ()):
        yield f"evaluation.rewards[{index}]", "reward", reward
    for name, params in config.tracking.items():
        mention = params if "path" in params else {**params, "name": name}
        yield f"tracking.{name}", "observer", ComponentRef.model_validate(mention)


def tracking_problems(config: RunConfig) -> list[Problem]:
    """Observers whose parameters make no reference to a component: the heading is the name already."""
    problems = []
    for heading, params in config.tracking.items():
        if "name" in params:
            what = "an observer's name is its heading, with path the heading may be any"
            problems.append(Problem(what, key=f"tracking.{heading}.name", given=str(params["name"])))
        if not isinstance(params.get("path", ""), str):
            given = str(params["path"])
            what = "should be a valid string"
            problems.append(Problem(what, f"tracking.{heading}.path", given=given, allowed="path.py:name"))
    return problems
