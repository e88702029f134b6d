"""Tables of the run file's keys, from the pydantic models that check it: one for each section."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

from builtins_page import PLURALS
from field_table import field_table
from pydantic import BaseModel

from grpox.config import ComponentRef, RunConfig, Section, WhenConfig
from grpox.runfile.slots import REFERENCES, SLOTS

ANCHORS = {
    "alarms.dead_reward": "dead-reward",
    "train.adaptive_entropy": "adaptive-entropy",
    "evaluation.early_stop": "early-stopping",
    "evaluation.sampling": "evaluation-sampling",
    "evaluation.sets": "evaluation-sets",
    "model.lora": "adapters",
}
"""Section within a section -> the anchor of its heading on the page. Others have their own name as anchor."""


def key_tables() -> dict[str, Callable[[], str]]:
    """Name of a marker -> the Markdown that replaces it: `keys:run`, `keys:train`, `keys:model.lora`."""
    tables: dict[str, Callable[[], str]] = {
        "keys:run": _run,
        "keys:rewards": partial(_beside_parameters, "reward"),
        "keys:environment": partial(_beside_parameters, "environment"),
        "keys:environment.when": partial(field_table, WhenConfig.model_fields),
    }
    for name, model in sections().items():
        tables[f"keys:{name}"] = partial(_section, name, model)
        for key, nested in sections(model).items():
            tables[f"keys:{name}.{key}"] = partial(field_table, nested.model_fields)
    return tables


def sections(model: type[Section] = RunConfig) -> dict[str, type[Section]]:
    """Key of the run file, or of a section -> the model of what stands under it, where that is a section."""
    found: dict[str, type[Section]] = {}
    for name, field in model.model_fields.items():
        for member in (field.annotation, *get_args(field.annotation)):
            if isinstance(member, type) and issubclass(member, Section):
                found[name] = member
    return found


def _run() -> str:
    """The keys of the file itself."""
    types = {
        name: f"[section](#{name})" + (" or null" if RunConfig.model_fields[name].default is None else "")
        for name in sections()
    }
    types["rewards"] = f"list of {_component('reward')}, each with [more keys](#rewards)"
    one = _component("environment")
    types["environment"] = f"{one}, or a list of them, with [more keys](#environment); or null"
    types["tracking"] = f"mapping of {_component('observer')} to its parameters"
    return field_table(RunConfig.model_fields, types | _slots(""))


def _section(name: str, model: type[Section]) -> str:
    """The keys of a section."""
    inner = {
        key: f"[section](#{ANCHORS[f'{name}.{key}']})"
        + (" or null" if model.model_fields[key].default is None else "")
        for key in sections(model)
    }
    return field_table(model.model_fields, _slots(name) | inner)


def _beside_parameters(kind: str) -> str:
    """The core's keys of a component of this kind, beside its parameters."""
    fields = REFERENCES[kind].model_fields.items()
    own = {name: field for name, field in fields if name not in ComponentRef.model_fields}
    types = {"when": "[mapping](#environment-rows) or null"}
    return field_table(own, {name: text for name, text in types.items() if name in own})


def _slots(section: str) -> dict[str, str]:
    """Key -> type of those keys of a section that name a component."""
    prefix = f"{section}." if section else ""
    own = {key.removeprefix(prefix): kind for key, kind in SLOTS.items() if key.rpartition(".")[0] == section}
    model: type[BaseModel] = sections()[section] if section else RunConfig
    return {
        key: _component(kind) + (" or null" if model.model_fields[key].default is None else "")
        for key, kind in own.items()
    }


def _component(kind: str) -> str:
    return f"[{kind}](built-ins.md#{PLURALS[kind]})"
