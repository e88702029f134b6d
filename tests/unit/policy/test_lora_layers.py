"""Layers with adapters: which get one, what merging adds, and log-probabilities through them, the head too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_models
from support.small_models import batch
from torch import Tensor
from transformers import PreTrainedModel

from grpox.config import LoraConfig, TrainConfig
from grpox.errors import ConfigError, Problem
from grpox.policy.adapter_folder import write_adapter
from grpox.policy.batch import FULL_LOGITS, ForwardMode
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.lora.add import add_adapters, targets_of
from grpox.policy.lora.layers import (
    adapted_layers,
    adapter_parameters,
    base_parameters,
    merge_adapters,
    parameter_counts,
    without_adapters,
)
from grpox.policy.scoring_forward import install_scoring_forward, restore_forward
from grpox.policy.weight_stream import stream_adapters, stream_base, stream_weights

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [3, 9, 4, 11, 12, 16]])
WITH_HEAD = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]


def model_of(kind: str = "llama", **settings: Any) -> PreTrainedModel:
    return small_models.model_of(kind, **{"tie_word_embeddings": False} | settings)


def adapted(model: PreTrainedModel, trained: bool = True, **settings: Any) -> PreTrainedModel:
    """`model` with adapters of rank 3; as after some steps, where `trained`."""
    add_adapters(model, LoraConfig(r=3, alpha=5, **settings), seed=1)
    if trained:
        draw = torch.Generator().manual_seed(2)
        for _, parameter in adapter_parameters(model):
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.data += 0.2 * noise.to(parameter.dtype)
    return model


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def refused(model: PreTrainedModel, **settings: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        targets_of(model, LoraConfig(**settings))
    return caught.value.problems[0]


# -- Which layers ----------------------------------------------------------------------------------------


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    model = model_of()
    names = targets_of(model, LoraConfig())
    assert len(names) == 2 * 7
    assert "lm_head" not in names
    assert names[0] == "model.layers.0.self_attn.q_proj"


def test_layers_are_named_by_the_ends_of_their_names() -> None:
    model = model_of()
    assert targets_of(model, LoraConfig(target_modules=["v_proj"])) == [
        f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)
    ]
    one = LoraConfig(target_modules=["layers.1.mlp.up_proj", "lm_head"])
    assert targets_of(model, one) == ["model.layers.1.mlp.up_proj", "lm_head"]
    but = LoraConfig(exclude_modules=["layers.0.mlp.up_proj", "q_proj"])
    assert len(targets_of(model, but)) == 14 - 3


def test_names_that_name_no_linear_layer_are_refused() -> None:
    model = model_of()
    slip = refused(model, target_modules=["q_prj"])
    assert (slip.key, slip.given, slip.nearest) == ("model.lora.target_modules", "q_prj", "q_proj")
    assert "down_proj" in slip.allowed
    assert "LlamaAttention" in refused(model, target_modules=["self_attn"]).what
    assert "Embedding" in refused(model, target_modules=["embed_tokens"]).what
    assert refused(model, exclude_modules=["lm_heat"]).key == "model.lora.exclude_modules"
    assert (
        "no layer gets an adapter" in refused(model, target_modules=["q_proj"], exclude_modules=["q_proj"]).what
    )


def test_a_head_that_is_the_embeddings_gets_no_adapter() -> None:
    assert "embeddings" in refused(model_of(tie_word_embeddings=True), target_modules=["lm_head"]).what


# -- What is trained -------------------------------------------------------------------------------------


def test_adapters_alone_are_trained_and_add_nothing_at_first() -> None:
    plain = model_of()
    model = adapted(copy.deepcopy(plain), trained=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 14
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert torch.equal(logits_of(model), logits_of(plain))
    sizes = [3 * sum(layer.in_features + layer.out_features for layer in adapted_layers(model).values())]
    assert parameter_counts(model) == (sizes[0], sizes[0] + sum(p.numel() for p in plain.parameters()))


def test_the_seed_alone_decides_what_adapters_begin_with() -> None:
    torch.manual_seed(0)
    models = []
    for seed in (1, 1, 2):
        before = torch.random.get_rng_state()
        model = model_of()
        torch.random.set_rng_state(before)
        add_adapters(model, LoraConfig(r=3), seed)
        assert torch.equal(torch.random.get_rng_state(), before)  # the run's own numbers are left alone
        models.append(torch.cat([parameter.flatten() for _, parameter in adapter_parameters(model)]))
        torch.rand(3)
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_a_model_with_adapters_gets_no_second_ones() -> None:
    with pytest.raises(ConfigError, match="merge the model's adapters first"):
        adapted(adapted(model_of()))


def test_the_reference_is_the_model_without_them() -> None:
    plain = model_of()
    model = adapted(copy.deepcopy(plain), target_modules=WITH_HEAD)
    assert not torch.allclose(logits_of(model), logits_of(plain))
    before = logits_of(model)
    with without_adapters(model):
        assert torch.equal(logits_of(model), logits_of(plain))
    assert torch.equal(logits_of(model), before)
    assert all(parameter.requires_grad for _, parameter in adapter_parameters(model))


# -- Merging ---------------------------------------------------------------------------------------------

KINDS = [
    ("llama", {"target_modules": WITH_HEAD}),
    ("llama", {"use_rslora": True}),
    ("qwen2", {"target_modules": ATTENTION}),  # its layers have biases
    ("gpt2", {}),  # its weights are [in, out]
]
SIZES: dict[str, dict[str, Any]] = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}}


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_what_is_streamed_and_the_folder_are_the_same_policy(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The stream is a plain model, and the folder one that peft loads."""
    plain = model_of(kind, **SIZES.get(kind, {}))
    model = adapted(copy.deepcopy(plain), **settings)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    streamed = dict(stream_weights(model))
    assert streamed.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name  # merging changes no weight that is trained
    taken = copy.deepcopy(plain)
    with torch.no_grad():
        for name, parameter in taken.named_parameters():
            parameter.copy_(streamed[name])
    torch.testing.assert_close(logits_of(taken), logits_of(model), rtol=0, atol=1e-10)
    for named in (stream_base(model), base_parameters(model)):
        for name, weight in named:
            assert torch.equal(weight, plain.get_parameter(name)), name
    write_adapter(model, dict(stream_adapters(model)), "the/base", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), autocast_adapter_dtype=False)
    assert loaded.peft_config["default"].base_model_name_or_path == "the/base"
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-10)
    merge_adapters(model)
    assert [*dict(model.named_parameters())] == [*streamed]
    torch.testing.assert_close(logits_of(model), logits_of(taken), rtol=0, atol=1e-12)


# -- Log-probabilities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [ATTENTION, WITH_HEAD, ["lm_head"]], ids=["body", "both", "head"])
@pytest.mark.parametrize("without", [False, True], ids=["with", "without"])
def test_log_probabilities_are_those_of_the_models_own_forward(targets: list[str], without: bool) -> None:
    plain = adapted(model_of(), target_modules=targets)
    model = copy.deepcopy(plain)
    ways = install_scoring_forward(model, TrainConfig())
    assert ways == ForwardMode(chunked=True, shared_width=32)
    given = batch()
    mask = given.token_mask
    upstream = torch.randn(mask.shape, dtype=torch.float64) * mask
    found = []
    for each, way in ((plain, FULL_LOGITS), (model, ways)):
        if without:
            with without_adapters(each), torch.no_grad():
                logprobs, entropy = completion_logprobs(each, given, 0.8, way)
        else:
            logprobs, entropy = completion_logprobs(each, given, 0.8, way)
            (logprobs * upstream).sum().backward()
        gradients = [p.grad for _, p in adapter_parameters(each) if p.grad is not None]
        found.append((logprobs[mask].detach(), entropy[mask].detach(), gradients))
    (expected, expected_entropy, by_hand), (logprobs, entropy, gradients) = found
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-6)
    assert len(gradients) == len(by_hand) == (0 if without else 2 * len(adapted_layers(model)))
    for gradient, other in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-6)
    assert all(p.grad is None for _, p in base_parameters(model))


def test_the_forward_of_the_head_is_restored() -> None:
    model = adapted(model_of(), target_modules=WITH_HEAD)
    install_scoring_forward(model, TrainConfig())
    restore_forward(model)
    assert not any("forward" in vars(module) for module in model.modules())
