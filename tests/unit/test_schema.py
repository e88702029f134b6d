"""The JSON schema covers what is installed: each component with its own parameters, and the bare names."""

from __future__ import annotations

from typing import Any

import pytest

from grpox.plugins import discover
from grpox.registry import Registry
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
    yield ComponentSpec("dapo", "grpox_steep:Loss")
    yield ComponentSpec("future", "grpox_steep:Loss", api=99)
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
    options = [
        c for c in choices(schema, slot) if name in c.get("properties", {}).get("name", {}).get("enum", [])
    ]
    assert len(options) == 1
    return options[0]


def test_a_component_has_its_own_parameters_and_no_others(schema: dict[str, Any]) -> None:
    dapo = named(schema, schema["properties"]["loss"], "dapo")
    assert set(dapo["properties"]) == {"name", "clip_low", "clip_high", "delta", "level"}
    assert dapo["additionalProperties"] is False
    assert dapo["required"] == ["name"]


def test_a_bare_name_is_one_of_those_installed(schema: dict[str, Any]) -> None:
    [bare] = [choice["enum"] for choice in choices(schema, schema["properties"]["loss"]) if "enum" in choice]
    assert {"dapo", "grpo", "grpox:dapo"} <= set(bare)
    assert schema["properties"]["loss"]["default"] == "dapo"


def test_a_reward_has_a_weight_beside_its_parameters(schema: dict[str, Any]) -> None:
    exact = named(schema, schema["properties"]["rewards"]["items"], "exact")
    assert {"name", "weight", "column"} <= set(exact["properties"])


def test_an_observer_has_its_parameters_under_its_name(schema: dict[str, Any]) -> None:
    mlflow = schema["properties"]["tracking"]["properties"]["mlflow"]
    assert "experiment" in mlflow["properties"]
    assert "name" not in mlflow["properties"]


def test_optional_slots_in_sections_take_null_or_a_component(schema: dict[str, Any]) -> None:
    for section, slot in (("data", "source"), ("train", "optimizer"), ("train", "scheduler")):
        options = at(schema, schema["properties"][section])["properties"][slot]["anyOf"]
        assert {"type": "null"} in options
        assert all("path" in choice["properties"] for choice in choices(schema, options[0]))


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    def follow(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                at(schema, node)
            for value in node.values():
                follow(value)
        elif isinstance(node, list):
            for value in node:
                follow(value)

    follow(schema)


def test_a_third_party_component_is_there_and_a_shared_name_needs_its_distribution(
    make_distribution: Any,
) -> None:
    make_distribution("grpox-steep", PLUGIN)
    schema = run_schema(Registry(discover()))
    loss = schema["properties"]["loss"]
    steep = named(schema, loss, "steep")
    assert steep["required"] == ["name", "steepness"]
    assert at(schema, steep["properties"]["inner"])["properties"]["depth"]["type"] == "integer"
    [bare] = [choice["enum"] for choice in choices(schema, loss) if "enum" in choice]
    # With a required parameter the bare name does not do; of two that share one, only the full one does.
    assert "steep" not in bare
    assert "dapo" not in bare
    assert {"grpox:dapo", "grpox-steep:dapo", "grpo"} <= set(bare)
    assert "future" not in str(loss) + str(choices(schema, loss))


def test_every_key_and_parameter_says_what_it_is(schema: dict[str, Any]) -> None:
    tables = {"run": schema, **schema["$defs"]}
    undescribed = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, field in table.get("properties", {}).items()
        if key not in ("name", "path") and not field.get("description")
    ]
    assert undescribed == []
