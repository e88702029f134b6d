"""`model.lora` in a run file: what is told before a model loads."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from grpox.config import LoraConfig, ModelConfig
from grpox.errors import ConfigError, Problem
from grpox.runfile import model_options
from grpox.runfile.load import load_run
from grpox.runfile.model_options import weight_names

MODEL = Path(str(resources.files("grpox.runfile.recipes") / "quickstart" / "model"))


def problems(*overrides: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", overrides)
    return {problem.key: problem for problem in caught.value.problems}


def test_an_empty_section_is_all_linear_layers_with_the_numbers_of_trl() -> None:
    config = load_run("quickstart", ["model.lora={}"]).config.model.lora
    assert config == LoraConfig(r=16, alpha=32, dropout=0, target_modules="all-linear")
    assert ModelConfig(path="x").lora is None


@pytest.mark.parametrize(
    ("overrides", "key", "told"),
    [
        (["model.lora={dropout: 0.05}"], "model.lora.dropout", "uses no dropout"),
        (["model.lora={target_modules: []}"], "model.lora.target_modules", "is empty"),
        (["model.lora={target_parameters: ['']}"], "model.lora.target_parameters", "an empty name"),
        (["generator={name: vllm-colocate, lora_sync: adapter}"], "generator.lora_sync", "there is no adapter"),
        (
            ["model.lora={}", "train.beta=0.1", "train.sync_ref_model=true"],
            "train.sync_ref_model", "does not work with adapters",
        ),
        (
            [
                "model.lora={}", "train.gradient_checkpointing=true",
                "train.gradient_checkpointing_kwargs={use_reentrant: true}",
            ],
            "train.gradient_checkpointing_kwargs.use_reentrant", "give no gradient",
        ),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(overrides: list[str], key: str, told: str) -> None:
    assert told in problems(*overrides)[key].what


def test_parameters_alone_may_have_adapters() -> None:
    overrides = ["model.lora={target_modules: [], target_parameters: [experts.down_proj]}"]
    config = load_run("quickstart", overrides).config.model.lora
    assert config is not None
    assert (config.target_modules, config.target_parameters) == ([], ["experts.down_proj"])


def test_adapters_of_parameters_reach_vllm_only_merged() -> None:
    lora = "model.lora={target_parameters: [experts.down_proj]}"
    problem = problems(lora, "generator={name: vllm-colocate, lora_sync: adapter}")["generator.lora_sync"]
    assert (problem.given, problem.allowed) == ("adapter", "merged")
    assert "model.lora.target_parameters" in problem.what
    load_run("quickstart", [lora, "generator={name: vllm-colocate}"])


def test_a_slip_in_a_layers_name_is_told_from_the_files_of_the_checkpoint() -> None:
    problem = problems("model.lora={target_modules: [q_proj, v_prj]}")["model.lora.target_modules"]
    assert (problem.given, problem.nearest) == ("v_prj", "v_proj")
    assert "down_proj" in problem.allowed
    # What is like no name of the checkpoint may be one of the model's: those are told when it is loaded.
    load_run("quickstart", ["model.lora={target_modules: [self_attn.q_proj, experts]}"])


def test_names_are_read_from_one_file_or_from_the_index_of_several(tmp_path: Path) -> None:
    assert "model.layers.0.self_attn.q_proj.weight" in weight_names(MODEL)
    index = {"weight_map": {"a.weight": "model-00001.safetensors", "b.weight": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_names(tmp_path) == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    "content", [b"", b"12345678", b"\x04\0\0\0\0\0\0\0[1,2", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"]
)
def test_files_that_are_damaged_are_left_to_whoever_loads_the_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weight_names(tmp_path) == []
    assert weight_names(tmp_path / "nowhere") == []


def test_without_peft_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return None if name == "peft" else object()

    monkeypatch.setattr(model_options, "find_spec", missing)
    assert "pip install 'grpox[lora]'" in problems("model.lora={}")["model.lora"].what
    load_run("quickstart")
