"""JSON schema of the run file with all installed components; editors use it to complete and check YAML.

Each component names its distribution: in its description for people, and under the key
``x-grpox-distribution`` for programs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from grpox.config import ComponentRef, RunConfig
from grpox.errors import ConfigError, describe
from grpox.plugins.discovery import Offer
from grpox.plugins.registry import Registry
from grpox.runfile.lr_schedules import SCHEDULES
from grpox.runfile.slots import REFERENCES, SLOTS

Schema = dict[str, Any]


def run_schema(registry: Registry) -> Schema:
    """Build the schema of `RunConfig` in which each slot lists the installed components.

    A slot accepts a bare name, a mapping of `name` and the component's parameters, or a mapping of `path` and
    parameters that only the object itself can check. A component whose requirements are missing is listed with
    a remark, because the run may be for another machine. ``$comment`` names omitted plugins, which are
    disabled, broken or written for another plugin API.
    """
    schema: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(),
    }
    schema["title"] = "grpox run file"
    records, offers = registry.plugins.records, registry.plugins.offers
    left_out = [f"{each} is {each.status}: {each.reason}" for each in records if each.status != "ok"]
    left_out += [f"{offer} is {offer.reason}" for offer in offers if offer.status == "incompatible"]
    if left_out:
        schema["$comment"] = f"Not covered: {'; '.join(left_out)}"
    definitions = schema["$defs"]
    kinds = {kind: f"{kind}.any" for kind in (*SLOTS.values(), *REFERENCES)}
    for kind, name in kinds.items():
        definitions[name] = _slot(registry, kind, definitions)
    for key, kind in SLOTS.items():
        section, _, name = key.rpartition(".")
        properties = schema["properties"]
        if section:
            properties = definitions[properties[section]["$ref"].rpartition("/")[2]]["properties"]
        properties[name] = _pointing_to(kinds[kind], properties[name])
    of_evaluation = definitions["EvaluationConfig"]["properties"]["rewards"]["anyOf"][0]
    for rewards in (schema["properties"]["rewards"], of_evaluation):
        rewards["items"] = {"$ref": _ref(kinds["reward"])}
    one, several = schema["properties"]["environment"]["anyOf"][0]["oneOf"]
    several["items"] = {"$ref": _ref(kinds["environment"])}
    one["$ref"] = _ref(kinds["environment"])
    tracking = schema["properties"]["tracking"]
    tracking["properties"] = {
        name: _parameters(registry, offer, definitions)
        for names, offer in _listed(registry, "observer")
        for name in names
    }
    tracking["additionalProperties"] = _by_path({})
    definitions["TrainConfig"]["properties"]["lr_scheduler_type"]["enum"] = list(SCHEDULES)
    for unused in ("ComponentRef", *(reference.__name__ for reference in REFERENCES.values())):
        definitions.pop(unused, None)
    return schema


def _pointing_to(definition: str, old: Schema) -> Schema:
    """Point the property `old`, a reference to a component, to `definition`; null stays possible."""
    reference = {"$ref": _ref(definition)}
    new = {name: value for name, value in old.items() if name in ("description", "default")}
    if isinstance(new.get("default"), dict):
        new["default"] = new["default"]["name"]
    return {**new, "anyOf": [reference, {"type": "null"}]} if "anyOf" in old else {**new, **reference}


def _slot(registry: Registry, kind: str, definitions: Schema) -> Schema:
    # The core's own keys beside the parameters, of a reward: `weight`, `on_error`, `timeout`.
    reference = REFERENCES.get(kind, ComponentRef).model_json_schema()
    definitions |= reference.get("$defs", {})
    own = reference["properties"].items()
    extra = {name: value for name, value in own if name not in ComponentRef.model_fields}
    bare: dict[str, str] = {}
    choices: list[Schema] = []
    for names, offer in _listed(registry, kind):
        component = _parameters(registry, offer, definitions)
        description: str = component["description"]
        if not component["required"]:
            bare |= dict.fromkeys(names, description)
        name = {"enum": names, "description": description}  # editors show the description for the name
        component["properties"] = {"name": name, **extra, **component["properties"]}
        component["required"] = ["name", *component["required"]]
        definition = f"{kind}.{names[-1]}"
        definitions[definition] = component
        choices.append({"$ref": _ref(definition)})
    # VS Code and the YAML language server show enumDescriptions beside the names.
    shorthand = [{"enum": list(bare), "enumDescriptions": list(bare.values())}] if bare else []
    return {"oneOf": [*shorthand, *choices, {**_by_path(extra), "not": {"required": ["name"]}}]}


def _by_path(extra: Schema) -> Schema:
    return {"type": "object", "properties": {"path": {"type": "string"}, **extra}, "required": ["path"]}


def _listed(registry: Registry, kind: str) -> Iterable[tuple[list[str], Offer]]:
    """Yield each component of `kind` with the names that select it: a shared name needs its distribution."""
    offers = [offer for offer in registry.plugins.offers if offer.kind == kind]
    count = Counter(offer.spec.name for offer in offers)
    for offer in offers:
        if offer.status != "incompatible":
            bare = [offer.spec.name] if count[offer.spec.name] == 1 else []
            yield [*bare, offer.qualified_name], offer


def _parameters(registry: Registry, offer: Offer, definitions: Schema) -> Schema:
    """Describe a component's parameters; models nested in its config go to `definitions`."""
    try:
        # A prefix for each component, because two components may nest models of the same name.
        prefix = re.sub(r"[^\w.-]", ".", f"{offer.kind}.{offer.qualified_name}.")
        model, unknown = registry.config_model(offer), ""
        schema = model.model_json_schema(ref_template=_ref(prefix + "{model}")) if model else {}
        definitions |= {prefix + name: nested for name, nested in schema.pop("$defs", {}).items()}
    except ConfigError as error:
        schema, unknown = {}, f"Parameters unknown: {error}"
    except Exception as error:  # noqa: BLE001 - the type of a plugin's field may have no schema
        schema, unknown = {}, f"Parameters unknown: {describe(error)}"
    summary = offer.spec.summary or schema.get("description", "")
    lacks = f"Not usable here: {offer.reason}." if offer.status == "unavailable" else ""
    return {
        "type": "object",
        "description": "\n\n".join(filter(None, (summary, f"From {offer.origin}.", lacks, unknown))),
        "x-grpox-distribution": offer.origin,
        "properties": schema.get("properties", {}),
        "required": schema.get("required", []),
        "additionalProperties": bool(unknown),
    }


def _ref(definition: str) -> str:
    return f"#/$defs/{definition}"
