"""The page of the run file's keys, from the pydantic models that check it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from builtins_page import PLURALS
from field_table import field_table
from pydantic import BaseModel

from grpox.config import ComponentRef, RewardRef, RunConfig, Section
from grpox.runfile.slots import SLOTS


def configuration() -> str:
    """Markdown: the table of the run file's keys, and one for each of its sections."""
    return "\n\n".join(_blocks())


def sections(model: type[Section] = RunConfig) -> dict[str, type[Section]]:
    """Key of the run file, or of a section -> the model of what stands under it, where that is a section."""
    found: dict[str, type[Section]] = {}
    for name, field in model.model_fields.items():
        for member in (field.annotation, *get_args(field.annotation)):
            if isinstance(member, type) and issubclass(member, Section):
                found[name] = member
    return found


def _blocks() -> Iterator[str]:
    of_run = {
        name: f"[section](#{name})" + (" or null" if RunConfig.model_fields[name].default is None else "")
        for name in sections()
    }
    of_run["rewards"] = f"list of {_component('reward')}, each with [more keys](#rewards)"
    of_run["tracking"] = f"mapping of {_component('observer')} to its parameters"
    yield "## The file"
    yield field_table(RunConfig.model_fields, of_run | _slots(""))
    for name, model in sections().items():
        yield f"## `{name}` {{ #{name} }}"
        inner = {key: f"[section](#{name}-{key}) or null" for key in sections(model)}
        yield field_table(model.model_fields, _slots(name) | inner)
        for key, nested in sections(model).items():
            yield f"## `{name}.{key}` {{ #{name}-{key} }}"
            yield field_table(nested.model_fields)
    own = {
        name: field for name, field in RewardRef.model_fields.items() if name not in ComponentRef.model_fields
    }
    yield "## `rewards` { #rewards }"
    yield "Each entry has the parameters of its component and these keys of the core:"
    yield field_table(own)


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
