"""One JSON schema of the run file over all that is installed, for editors to complete and check YAML by.

Each component says which distribution adds it: in its description, which editors show, and for programs under
the key ``x-grpox-distribution``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from grpox.config import ComponentRef, RewardRef, RunConfig
from grpox.errors import ConfigError, describe
from grpox.plugins.discovery import Offer, PluginSet
from grpox.plugins.registry import Registry
from grpox.runfile.lr_schedules import LR_SCHEDULER_TYPES
from grpox.runfile.slots import SLOTS

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema(registry: Registry) -> Schema:
    """The schema of `RunConfig` in which each component slot lists the components that are installed.

    A slot takes a bare name, a mapping of `name` and that component's own parameters, or a mapping of `path`
    and parameters that only the object itself can check. A component that lacks requirements here is there, and
    says so: the run may be for another machine. Plugins that are disabled, broken or of another plugin API are
    left out, and told in ``$comment``.
    """
    schema: Schema = {"$schema": _DIALECT, **RunConfig.model_json_schema()}
    schema["title"] = "grpox run file"
    if left_out := "; ".join(_left_out(registry.plugins)):
        schema["$comment"] = f"Not covered: {left_out}"
    definitions = schema["$defs"]
    kinds = {kind: f"{kind}.any" for kind in (*SLOTS.values(), "reward")}
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
    tracking = schema["properties"]["tracking"]
    tracking["properties"] = {
        name: _parameters(registry, offer, definitions)
        for names, offer in _listed(registry, "observer")
        for name in names
    }
    tracking["additionalProperties"] = _by_path({})
    definitions["TrainConfig"]["properties"]["lr_scheduler_type"]["enum"] = list(LR_SCHEDULER_TYPES)
    for unused in (ComponentRef, RewardRef):
        definitions.pop(unused.__name__, None)
    return schema


def _left_out(plugins: PluginSet) -> Iterable[str]:
    yield from (f"{r} is {r.status}: {r.reason}" for r in plugins.records if r.status != "ok")
    for offer in plugins.offers:
        if offer.status == "incompatible":
            yield f"{offer.kind} '{offer.spec.name}' of {_distribution(offer)} is {offer.reason}"


def _pointing_to(definition: str, old: Schema) -> Schema:
    """The property `old`, a reference to a component, now pointing to `definition`; null stays possible."""
    reference = {"$ref": _ref(definition)}
    kept = {name: value for name, value in old.items() if name in ("description", "default")}
    if isinstance(kept.get("default"), dict):
        kept["default"] = kept["default"]["name"]
    return {**kept, "anyOf": [reference, {"type": "null"}]} if "anyOf" in old else {**kept, **reference}


def _slot(registry: Registry, kind: str, definitions: Schema) -> Schema:
    # What the core takes beside a reward's parameters: `weight`, `on_error`, `timeout`.
    of_rewards = RewardRef.model_json_schema()["properties"] if kind == "reward" else {}
    extra = {name: value for name, value in of_rewards.items() if name not in ComponentRef.model_fields}
    bare: dict[str, str] = {}
    choices: list[Schema] = []
    for names, offer in _listed(registry, kind):
        component = _parameters(registry, offer, definitions)
        said: str = component["description"]
        if not component["required"]:
            bare |= dict.fromkeys(names, said)
        named = {"enum": names, "description": said}  # what an editor shows for the name itself
        component["properties"] = {"name": named, **extra, **component["properties"]}
        component["required"] = ["name", *component["required"]]
        definition = f"{kind}.{names[-1]}"
        definitions[definition] = component
        choices.append({"$ref": _ref(definition)})
    # enumDescriptions is what VS Code and the YAML language server show beside each of the names.
    shorthand = [{"enum": list(bare), "enumDescriptions": list(bare.values())}] if bare else []
    return {"oneOf": [*shorthand, *choices, {**_by_path(extra), "not": {"required": ["name"]}}]}


def _by_path(extra: Schema) -> Schema:
    return {"type": "object", "properties": {"path": {"type": "string"}, **extra}, "required": ["path"]}


def _listed(registry: Registry, kind: str) -> Iterable[tuple[list[str], Offer]]:
    """Each offer of `kind` and the names that select it: a name that several share needs its dist."""
    offers = [offer for offer in registry.plugins.offers if offer.kind == kind]
    count = Counter(offer.spec.name for offer in offers)
    for offer in offers:
        if offer.status != "incompatible":
            bare = [offer.spec.name] if count[offer.spec.name] == 1 else []
            yield [*bare, offer.qualified_name], offer


def _parameters(registry: Registry, offer: Offer, definitions: Schema) -> Schema:
    """What a component takes beside its name; models nested in its config go to `definitions`."""
    try:
        # Two components may nest models of one name: each gets a prefix of its own.
        prefix = re.sub(r"[^\w.-]", ".", f"{offer.kind}.{offer.qualified_name}.")
        model, unknown = registry.config_model(offer), ""
        schema = model.model_json_schema(ref_template=_ref(prefix + "{model}")) if model else {}
        definitions |= {prefix + name: nested for name, nested in schema.pop("$defs", {}).items()}
    except ConfigError as error:
        schema, unknown = {}, f"Parameters unknown: {error}"
    except Exception as error:  # noqa: BLE001 - a field's type may have no schema; one plugin's is its own affair
        schema, unknown = {}, f"Parameters unknown: {describe(error)}"
    summary = offer.spec.summary or schema.get("description", "")
    lacks = f"Not usable here: {offer.reason}." if offer.status == "unavailable" else ""
    return {
        "type": "object",
        "description": "\n\n".join(
            part for part in (summary, f"From {_distribution(offer)}.", lacks, unknown) if part
        ),
        "x-grpox-distribution": _distribution(offer),
        "properties": schema.get("properties", {}),
        "required": schema.get("required", []),
        "additionalProperties": bool(unknown),
    }


def _distribution(offer: Offer) -> str:
    return f"{offer.distribution} {offer.version}"


def _ref(definition: str) -> str:
    return f"#/$defs/{definition}"
