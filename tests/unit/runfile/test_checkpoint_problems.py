"""Models that their config.json does not describe, and arguments that transformers may not be handed."""

from __future__ import annotations

import importlib.resources
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import FURTHER, OWN, further_model
from support.problems import refused
from tokenizers import AddedToken
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from grpox.config import ModelConfig, TrainConfig
from grpox.policy.memory_plan.of_run import model_shape
from grpox.policy.model_folder import save_whole, undescribed
from grpox.policy.models import check_special_tokens, load_model
from grpox.runfile.model_options import (
    CHECKPOINT_ARGUMENTS,
    DEQUANTIZED,
    checkpoint_problems,
    checkpointing_problems,
    init_problems,
)

QUICKSTART = Path(str(importlib.resources.files("grpox.runfile.recipes"))) / "quickstart" / "model"
Weights = dict[str, Tensor]
SETTINGS = {
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
    "compressed-tensors": {
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
}


def narrow(weights: Weights, method: str) -> None:
    """Store the large weights as `method` does."""
    ends = ("experts.down_proj", "experts.gate_up_proj") if method == "mxfp4" else "proj.weight"
    for name in [name for name in weights if name.endswith(ends)]:
        weight = weights[name]
        if method == "mxfp4":
            experts, inputs, outputs = weights.pop(name).shape
            blocks = torch.randint(0, 255, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            weights[f"{name}_blocks"] = blocks
            weights[f"{name}_scales"] = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)
            continue
        scale = weight.abs().max().reshape(1, 1) if method == "fp8" else weight.abs().amax(1, keepdim=True)
        weights[name] = (weight / scale * 448).to(torch.float8_e4m3fn)
        weights[name + ("_scale_inv" if method == "fp8" else "_scale")] = scale / 448


def changed(folder: Path, edit: Callable[[Weights], object], **config: object) -> ModelConfig:
    """Change the weights and the config of a saved model."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return ModelConfig(path=str(folder))


def quantised(folder: Path, method: str) -> tuple[ModelConfig, PreTrainedModel]:
    model = further_model("gpt_oss" if method == "mxfp4" else "qwen2")
    model.save_pretrained(folder)
    settings = {"quant_method": method, **SETTINGS[method]}
    return changed(folder, lambda weights: narrow(weights, method), quantization_config=settings), model


@pytest.mark.parametrize("method", SETTINGS)
def test_a_quantised_model_is_refused_or_widened(method: str, tmp_path: Path) -> None:
    config, model = quantised(tmp_path, method)
    [problem] = refused(load_model, config)
    assert method in problem.what
    assert problem.allowed.startswith("model.dequantize: true, or")
    config.dequantize = True
    assert model_shape(config).parameters == model.num_parameters()
    widened = load_model(config)
    assert {weight.dtype for weight in widened.parameters()} == {torch.float32}
    for (name, actual), expected in zip(widened.named_parameters(), model.parameters(), strict=True):
        assert method == "mxfp4" or torch.allclose(actual, expected, atol=0.005), name
    widened(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    save_whole(widened, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("method", ["gptq", "awq", "a-method-of-tomorrow"])
def test_what_transformers_cannot_widen_is_refused_in_any_case(method: str, tmp_path: Path) -> None:
    further_model("qwen2").save_pretrained(tmp_path)
    config = changed(tmp_path, lambda weights: None, quantization_config={"quant_method": method, "bits": 4})
    config.dequantize = True
    [problem] = refused(load_model, config)
    assert method in problem.what
    assert "dequantize" not in problem.allowed


@pytest.mark.parametrize("name", ["qweight", "weight_packed", "weight.absmax", "weight"])
def test_quantised_weights_that_config_json_does_not_name(name: str, tmp_path: Path) -> None:
    further_model("qwen2").save_pretrained(tmp_path)
    dtype = torch.float8_e4m3fn if name == "weight" else torch.int32
    added = {f"model.layers.0.self_attn.q_proj.{name}": torch.ones(64, 64).to(dtype)}
    [problem] = checkpoint_problems(changed(tmp_path, lambda weights: weights.update(added)))
    assert next(iter(added)) in problem.what


def test_the_methods_that_transformers_can_widen_are_these() -> None:
    late = {
        name.removesuffix("_4bit").removesuffix("_8bit")
        for name, quantizer in AUTO_QUANTIZER_MAPPING.items()
        if quantizer._dequantize is not HfQuantizer._dequantize
    }
    early = {
        name
        for name, config in AUTO_QUANTIZATION_CONFIG_MAPPING.items()
        if "dequantize" in config.__init__.__code__.co_varnames and name != "gguf"
    }
    assert late | early == {*DEQUANTIZED}


def test_a_head_of_its_own_is_refused_where_config_json_ties_it(tmp_path: Path) -> None:
    further_model("gemma").save_pretrained(tmp_path)
    name, embeddings = "lm_head.weight", "model.embed_tokens.weight"
    config = changed(tmp_path, lambda w: w.update({name: w[embeddings] + 1}), tie_word_embeddings=True)
    [problem] = checkpoint_problems(config)
    assert (problem.key, name in problem.what) == ("model.path", True)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["tie_word_embeddings"]  # as in most of its kind, whose class ties by default
    (tmp_path / "config.json").write_text(json.dumps(content))
    [problem] = refused(load_model, config)
    assert name in problem.what
    changed(tmp_path, lambda w: w.update({name: w[embeddings].clone()}), tie_word_embeddings=True)
    assert list(checkpoint_problems(config)) == []
    model = load_model(config)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    # Also one in another file than the embeddings.
    further_model("qwen2").save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    content = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(content))
    [problem] = checkpoint_problems(ModelConfig(path=str(tmp_path)))
    assert "lm_head.weight" in problem.what


@pytest.mark.parametrize("kind", [*OWN, *FURTHER])
def test_the_config_of_each_kind_describes_its_model(kind: str) -> None:
    for tied in (False, True):
        assert undescribed(further_model(kind, tie_word_embeddings=tied)) == ""


def with_tokens(folder: Path, *tokens: str, special: bool = False, template: str | None = None) -> ModelConfig:
    shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens], special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("tokens", "special", "template", "count"),
    [
        ((), False, None, 0),
        (("one", "two"), False, None, 2),
        (("<image>",), True, None, 0),  # in no text: a prompt with it is refused by its row
        (("<turn>",), True, "<turn>{{ messages }}", 1),
    ],
)
def test_tokens_beyond_the_embeddings(
    tokens: tuple[str, ...], special: bool, template: str | None, count: int, tmp_path: Path
) -> None:
    config = with_tokens(tmp_path, *tokens, special=special, template=template)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), load_model(config).config
    if not count:
        check_special_tokens(tokenizer, model, config.path)
        return
    [problem] = refused(check_special_tokens, tokenizer, model, config.path)
    assert f"{count} in all: {tokens[0]} 17" in problem.what


@pytest.mark.parametrize(
    "name",
    ["dtype", "torch_dtype", "device_map", "load_in_4bit", "quantization_config", "ignore_mismatched_sizes"],
)
def test_what_would_place_or_change_weights_is_refused(name: str) -> None:
    [problem] = init_problems(ModelConfig(path="m", init={name: "float16", "revision": "v1"}))
    assert (problem.key, problem.what.partition(":")[0]) == (f"model.init.{name}", "is not allowed here")
    assert ("use model.dtype" in problem.what) == name.endswith("dtype")


def test_the_arguments_of_checkpointing_are_torchs_and_mean_something() -> None:
    """Its context_fn is a function, which no run file can hold."""
    parameters = inspect.signature(checkpoint).parameters
    named = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} - {"context_fn"}
    assert named | {"preserve_rng_state"} == {*CHECKPOINT_ARGUMENTS}
    slip = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrent": True}}
    unused = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    for train, key, nearest in ((slip, ".use_reentrent", "use_reentrant"), (unused, "", "")):
        [problem] = checkpointing_problems(TrainConfig.model_validate(train))
        assert (problem.key, problem.nearest) == (f"train.gradient_checkpointing_kwargs{key}", nearest)
