"""Listing the built-in algorithms imports no torch, and what their specs name can be imported and built."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

import grpox_advantages.plugin
import grpox_corrections.plugin
import grpox_losses.plugin
from grpox import ComponentSpec

SPECS = {
    "grpox_losses": grpox_losses.plugin.grpox_losses(),
    "grpox_advantages": grpox_advantages.plugin.grpox_advantages(),
    "grpox_corrections": grpox_corrections.plugin.grpox_corrections(),
}
each_spec = pytest.mark.parametrize(
    ("package", "spec"),
    [
        pytest.param(package, spec, id=f"{package}:{spec.name}")
        for package, specs in SPECS.items()
        for spec in specs
    ],
)


def load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", [*SPECS, "grpox_rewards", "grpox_mlflow"])
def test_plugin_and_configs_import_without_torch(package: str) -> None:
    heavy = "{'torch', 'transformers', 'deepspeed', 'vllm', 'mlflow'}"
    code = f"import {package}.plugin, {package}.configs, sys; print(sorted({heavy} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_names() -> None:
    assert {package: " ".join(spec.name for spec in specs) for package, specs in SPECS.items()} == {
        "grpox_losses": "grpo dr_grpo dapo bnpo luspo cispo sapo gspo-token dppo topr",
        "grpox_advantages": ("group batch none rloo reinforce_plus_plus maxrl opo quantile gigpo return-to-go"),
        "grpox_corrections": ("none token-truncate token-mask sequence-truncate sequence-mask geometric-mask"),
    }


@each_spec
def test_a_spec_and_every_parameter_are_documented(package: str, spec: ComponentSpec) -> None:
    assert 0 < len(spec.summary) <= 100
    assert spec.formula
    if spec.config:
        model = load(spec.config)
        assert issubclass(model, BaseModel)
        assert model.model_config["extra"] == "forbid"
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_every_correction_but_none_needs_the_generators_log_probabilities() -> None:
    needs = {spec.name: tuple(spec.needs) for spec in SPECS["grpox_corrections"]}
    assert needs.pop("none") == ()
    assert set(needs.values()) == {("logprobs",)}
