"""One JSON schema of the run file over all that is installed, for editors to complete and check YAML by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from grpox.config import ComponentRef, RewardRef, RunConfig
from grpox.plugins import Offer
from grpox.registry import Registry
from grpox.runfile.lr_schedules import LR_SCHEDULER_TYPES
from grpox.runfile.slots import SLOTS

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema(registry: Registry) -> Schema:
    """The schema of `RunConfig` in which each component slot lists the components that are installed.

    A slot takes a bare name, a mapping of `name` and that component's own parameters, or a mapping of `path`
    and parameters that only the object itself can check. Components that cannot be used are left out.
    """
    schema: Schema = {"$schema": _DIALECT, **RunConfig.model_json_schema()}
    schema["title"] = "grpox run file"
    definitions = schema["$defs"]
    kinds = {kind: f"{kind}.any" for kind in (*SLOTS.values(), "reward")}
    for kind, name in kinds.items():
        definitions[name] = _slot(registry, kind, definitions)
    for key, kind in SLOTS.items():
        section, _, name = key.rpartition(".")
        properties = (_section(schema, section) if section else schema)["properties"]
        properties[name] = _pointing_to(kinds[kind], properties[name])
    schema["properties"]["rewards"]["items"] = {"$ref": _ref(kinds["reward"])}
    _describe_observers(schema["properties"]["tracking"], registry, definitions)
    definitions["TrainConfig"]["properties"]["lr_scheduler_type"]["enum"] = list(LR_SCHEDULER_TYPES)
    for unused in (ComponentRef, RewardRef):
        definitions.pop(unused.__name__, None)
    return schema


def _section(schema: Schema, name: str) -> Schema:
    definition: Schema = schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]]
    return definition


def _pointing_to(definition: str, old: Schema) -> Schema:
    """The property `old`, a reference to a component, now pointing to `definition`; null stays possible."""
    reference = {"$ref": _ref(definition)}
    kept = {name: value for name, value in old.items() if name in ("description", "default")}
    if isinstance(kept.get("default"), dict):
        kept["default"] = kept["default"]["name"]
    return {**kept, "anyOf": [reference, {"type": "null"}]} if "anyOf" in old else {**kept, **reference}


def _slot(registry: Registry, kind: str, definitions: Schema) -> Schema:
    extra = _reward_keys() if kind == "reward" else {}
    bare: list[str] = []
    choices: list[Schema] = []
    for names, offer in _usable(registry, kind):
        component = _parameters(registry, offer, definitions)
        component["properties"] = {"name": {"enum": names}, **extra, **component["properties"]}
        if not component["required"]:
            bare += names
        component["required"] = ["name", *component["required"]]
        definition = f"{kind}.{names[-1]}"
        definitions[definition] = component
        choices.append({"$ref": _ref(definition)})
    shorthand = [{"enum": bare}] if bare else []
    return {"oneOf": [*shorthand, *choices, {**_by_path(extra), "not": {"required": ["name"]}}]}


def _by_path(extra: Schema) -> Schema:
    return {"type": "object", "properties": {"path": {"type": "string"}, **extra}, "required": ["path"]}


def _reward_keys() -> Schema:
    """What the core takes beside a reward's parameters: `weight`, `on_error`, `timeout`."""
    properties = RewardRef.model_json_schema()["properties"]
    return {name: properties[name] for name in properties if name not in ComponentRef.model_fields}


def _usable(registry: Registry, kind: str) -> Iterable[tuple[list[str], Offer]]:
    """Each usable offer of `kind` and the names that select it: a name that several share needs its dist."""
    offers = [offer for offer in registry.plugins.offers if offer.kind == kind]
    count = Counter(offer.spec.name for offer in offers)
    for offer in offers:
        if offer.status == "ok":
            bare = [offer.spec.name] if count[offer.spec.name] == 1 else []
            yield [*bare, offer.qualified_name], offer


def _parameters(registry: Registry, offer: Offer, definitions: Schema) -> Schema:
    """What a component takes beside its name; models nested in its config go to `definitions`."""
    model = registry.config_model(offer)
    schema = _own_schema(model, offer, definitions) if model else {}
    return {
        "type": "object",
        "description": offer.spec.summary or schema.get("description", ""),
        "properties": schema.get("properties", {}),
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


def _own_schema(model: type[BaseModel], offer: Offer, definitions: Schema) -> Schema:
    # Two components may nest models of one name: each gets a prefix of its own.
    prefix = re.sub(r"[^\w.-]", ".", f"{offer.kind}.{offer.qualified_name}.")
    schema = model.model_json_schema(ref_template=_ref(prefix + "{model}"))
    for name, definition in schema.pop("$defs", {}).items():
        definitions[prefix + name] = definition
    return schema


def _describe_observers(tracking: Schema, registry: Registry, definitions: Schema) -> None:
    tracking["properties"] = {
        name: _parameters(registry, offer, definitions)
        for names, offer in _usable(registry, "observer")
        for name in names
    }
    tracking["additionalProperties"] = _by_path({})


def _ref(definition: str) -> str:
    return f"#/$defs/{definition}"
