"""The JSON schema covers what is installed: each component with its own parameters, and the bare names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.runfile.schema import run_schema

PLUGIN = """
from pydantic import BaseModel
from grpox import ComponentSpec, hookimpl

class Inner(BaseModel):
    depth: int = 1

class Config(BaseModel):
    steepness: float
    inner: Inner = Inner()

@hookimpl
def grpox_losses():
    yield ComponentSpec("steep", "grpox_steep:Loss", config="grpox_steep:Config", summary="Steep.")
    yield ComponentSpec("flat", "grpox_steep:Loss", summary="Flat.")
    yield ComponentSpec("dapo", "grpox_steep:Loss")
    yield ComponentSpec("future", "grpox_steep:Loss", api=99)
"""

ODD = """
from collections.abc import Callable
from pydantic import BaseModel
from grpox import ComponentSpec, hookimpl

class Calls(BaseModel):
    how: Callable[[int], int]

@hookimpl
def grpox_losses():
    yield ComponentSpec("lacking", "grpox_odd:Loss", requires=("nothing-such>=1",), summary="Lacks.")
    yield ComponentSpec("lost", "grpox_odd:Loss", config="no_such_module:Config")
    yield ComponentSpec("calls", "grpox_odd:Loss", config="grpox_odd:Calls")
"""


@pytest.fixture
def schema() -> dict[str, Any]:
    return run_schema(Registry(discover()))


def at(schema: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]
    return found


def choices(schema: dict[str, Any], slot: dict[str, Any]) -> list[dict[str, Any]]:
    return [at(schema, choice) if "$ref" in choice else choice for choice in at(schema, slot)["oneOf"]]


def named(schema: dict[str, Any], slot: dict[str, Any], name: str) -> dict[str, Any]:
    """The one choice of the slot that `name` selects."""
    own = [choice for choice in choices(schema, slot) if "properties" in choice]
    [option] = [each for each in own if name in each["properties"].get("name", {}).get("enum", [])]
    return option


def bare_names(schema: dict[str, Any]) -> dict[str, str]:
    """The bare names of losses, with their descriptions."""
    [bare] = [choice for choice in choices(schema, schema["properties"]["loss"]) if "enum" in choice]
    return dict(zip(bare["enum"], bare["enumDescriptions"], strict=True))


def test_each_slot_has_its_components_with_their_own_parameters_and_no_others(schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    dapo = named(schema, properties["loss"], "dapo")
    assert set(dapo["properties"]) == {"name", "clip_low", "clip_high", "delta", "level"}
    assert dapo["additionalProperties"] is False
    assert dapo["required"] == ["name"]
    assert {"dapo", "grpo", "grpox:dapo"} <= bare_names(schema).keys()
    assert properties["loss"]["default"] == "dapo"
    exact = named(schema, properties["rewards"]["items"], "exact")
    assert {"name", "weight", "column"} <= set(exact["properties"])
    mlflow = properties["tracking"]["properties"]["mlflow"]
    assert "experiment" in mlflow["properties"]
    assert "name" not in mlflow["properties"]
    for section, slot in (("data", "source"), ("train", "optimizer"), ("train", "scheduler")):
        options = at(schema, properties[section])["properties"][slot]["anyOf"]
        assert {"type": "null"} in options
        assert all("path" in choice["properties"] for choice in choices(schema, options[0]))


def test_every_reference_leads_somewhere_and_every_key_says_what_it_is(schema: dict[str, Any]) -> None:
    assert set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema))) <= schema["$defs"].keys()
    tables = {"run": schema, **schema["$defs"]}
    undescribed = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, field in table.get("properties", {}).items()
        if key not in ("name", "path") and not field.get("description")
    ]
    assert undescribed == []


def test_a_third_party_component_names_its_distribution_and_a_shared_name_needs_it(
    make_distribution: Any,
) -> None:
    make_distribution("grpox-steep", PLUGIN, version="0.7")
    schema = run_schema(Registry(discover()))
    loss = schema["properties"]["loss"]
    steep = named(schema, loss, "steep")
    assert steep["required"] == ["name", "steepness"]
    assert at(schema, steep["properties"]["inner"])["properties"]["depth"]["type"] == "integer"
    assert "future" not in str(loss) + str(choices(schema, loss))
    # With a required parameter the bare name does not do; of two that share one, only the full one does.
    bare = bare_names(schema)
    assert {"grpox:dapo", "grpox-steep:dapo", "grpo"} <= bare.keys()
    assert bare.keys().isdisjoint({"steep", "dapo"})
    assert "From grpox 0" in bare["grpo"]
    assert bare["flat"] == "Flat.\n\nFrom grpox-steep 0.7."
    # For people and for programs.
    assert steep["x-grpox-distribution"] == "grpox-steep 0.7"
    assert steep["description"] == "Steep.\n\nFrom grpox-steep 0.7."
    assert steep["properties"]["name"]["description"] == steep["description"]
    assert named(schema, loss, "grpox-steep:dapo")["x-grpox-distribution"] == "grpox-steep 0.7"
    assert named(schema, loss, "grpox:dapo")["x-grpox-distribution"].startswith("grpox 0")


def test_every_installed_component_is_there_with_the_distribution_that_adds_it(schema: dict[str, Any]) -> None:
    told = {
        (name.partition(".")[0], names[-1], definition["x-grpox-distribution"])
        for name, definition in schema["$defs"].items()
        if (names := definition.get("properties", {}).get("name", {}).get("enum"))
    }
    observers = schema["properties"]["tracking"]["properties"].items()
    told |= {("observer", name, each["x-grpox-distribution"]) for name, each in observers if ":" in name}
    offers = discover().offers
    assert told == {(each.kind, each.qualified_name, f"{each.distribution} {each.version}") for each in offers}


def test_a_component_that_cannot_run_here_or_be_described_says_so_and_spoils_no_other(
    make_distribution: Any,
) -> None:
    make_distribution("grpox-odd", ODD)
    schema = run_schema(Registry(discover()))
    lacking = named(schema, schema["properties"]["loss"], "lacking")
    assert "Not usable here: needs nothing-such>=1: not installed" in lacking["description"]
    for name, why in (("lost", "ModuleNotFoundError"), ("calls", "PydanticInvalidForJsonSchema")):
        component = named(schema, schema["properties"]["loss"], name)
        assert "Parameters unknown: " in component["description"]
        assert why in component["description"]
        assert component["additionalProperties"] is True
    assert named(schema, schema["properties"]["loss"], "dapo")["additionalProperties"] is False


def test_what_is_left_out_is_told_with_its_reason(make_distribution: Any) -> None:
    make_distribution("grpox-steep", PLUGIN)
    make_distribution("grpox-bad", "raise ValueError('no')")
    make_distribution("grpox-off", "")
    comment = run_schema(Registry(discover(disable=["grpox-off"])))["$comment"]
    assert "plugin 'plugin' of grpox-bad 1.0 is broken: ValueError: no" in comment
    assert "plugin 'plugin' of grpox-off 1.0 is disabled" in comment
    assert "plugins.disable list" in comment
    assert "loss 'future' of grpox-steep 1.0" in comment
    assert "plugin API 99" in comment
