"""Adapters of layers and of parameters such as stacked experts: against peft's own, and by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_models
from support.architectures import tiny_model
from support.problems import problem_of
from support.small_models import batch
from torch import Tensor
from transformers import PreTrainedModel

from grpox.config import LoraConfig, TrainConfig
from grpox.errors import ConfigError, Problem
from grpox.policy.adapter_folder import write_adapter
from grpox.policy.attention import VARLEN, set_attention
from grpox.policy.batch import FULL_LOGITS, ForwardMode
from grpox.policy.engine import _check_parameters_read
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.lora.add import add_adapters, parameter_targets, targets_of
from grpox.policy.lora.layers import (
    adapted_layers,
    adapter_parameters,
    base_parameters,
    describe_training,
    merge_adapters,
    parameter_adapters,
    parameter_counts,
    parameters_of,
    without_adapters,
)
from grpox.policy.scoring_forward import install_scoring_forward, restore_forward
from grpox.policy.weight_stream import stream_adapters, stream_base, stream_weights

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [3, 9, 4, 11, 12, 16]])
WITH_HEAD = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
R, ALPHA = 3, 5
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
STACKED: dict[str, list[str]] = {
    "qwen3_moe": [*EXPERTS, "gate.weight"],  # the router's weight is a matrix
    "gpt_oss": [*EXPERTS, "experts.down_proj_bias"],  # its stacks are [E, in, out]
    "deepseek_v3": EXPERTS,  # its first layer has no experts
}


def model_of(kind: str = "llama", **settings: Any) -> PreTrainedModel:
    return small_models.model_of(kind, **{"tie_word_embeddings": False} | settings)


def adapted(model: PreTrainedModel, trained: bool = True, **settings: Any) -> PreTrainedModel:
    """`model` with adapters of rank 3; as after some steps, where `trained`."""
    add_adapters(model, LoraConfig(r=R, alpha=ALPHA, **settings), seed=1)
    if trained:
        draw = torch.Generator().manual_seed(2)
        for _, parameter in adapter_parameters(model):
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.data += 0.2 * noise.to(parameter.dtype)
    return model


def plain_model(kind: str) -> PreTrainedModel:
    model = tiny_model(kind).double()
    model.config._experts_implementation = "eager"  # torch's grouped products take no float64
    return model


def stacked(kind: str, **settings: Any) -> PreTrainedModel:
    """A model with adapters as after some steps, of stacks and of a linear layer."""
    targets = {"target_modules": ["o_proj"], "target_parameters": STACKED[kind]}
    return adapted(plain_model(kind), **targets | settings)


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def refused(model: PreTrainedModel, **settings: Any) -> Problem:
    return problem_of(add_adapters, model, LoraConfig(**settings), seed=0)


def test_layers_are_all_linear_ones_but_the_head_or_named_by_the_ends_of_their_names() -> None:
    model = model_of()
    names = targets_of(model, LoraConfig())
    assert len(names) == 2 * 7
    assert "lm_head" not in names
    assert names[0] == "model.layers.0.self_attn.q_proj"
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
    none = refused(model, target_modules=["q_proj"], exclude_modules=["q_proj"])
    assert "no layer gets an adapter" in none.what
    assert "embeddings" in refused(model_of(tie_word_embeddings=True), target_modules=["lm_head"]).what


def test_parameters_are_named_by_the_ends_of_their_names(tmp_path: Path) -> None:
    model = plain_model("qwen3_moe")
    config = LoraConfig(target_modules=[], target_parameters=["experts.down_proj", "layers.1.mlp.gate.weight"])
    names = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1)]
    assert parameter_targets(model, config) == [*names, "model.layers.1.mlp.gate.weight"]
    add_adapters(model, config, seed=0)
    assert "on 3 parameters" in describe_training(model)
    # One gate alone: the end of its name is also that of the other.
    for each, written in (
        (model, [*names, "model.layers.1.mlp.gate.weight"]),
        (stacked("qwen3_moe"), ["experts.down_proj", "experts.gate_up_proj", "gate.weight"]),
    ):
        write_adapter(each, dict(stream_adapters(each)), "base", tmp_path)
        assert peft.PeftConfig.from_pretrained(tmp_path).target_parameters == written


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("q_proj.weight", "model.lora.target_modules"),
        ("embed_tokens.weight", "Embedding"),
        ("norm.weight", "1 dimensions"),
        ("mlp.experts", "a module"),
    ],
)
def test_names_of_what_can_have_no_adapter_of_its_own_are_refused(target: str, what: str) -> None:
    problem = refused(tiny_model("qwen3_moe"), target_parameters=[target])
    assert (problem.key, problem.given) == ("model.lora.target_parameters", target)
    assert what in problem.what


def test_parameters_that_a_model_lacks_or_that_peft_takes_for_layers_are_refused() -> None:
    slip = refused(tiny_model("qwen3_moe"), target_parameters=["mlp.experts.gate_up_prj"])
    assert slip.nearest == "experts.gate_up_proj"
    assert slip.allowed == "experts.gate_up_proj, experts.down_proj, gate.weight"
    assert "no such key" in refused(tiny_model("llama"), target_parameters=["experts.down_proj"]).allowed
    mixed = refused(tiny_model("deepseek_v3"), target_parameters=EXPERTS)
    assert mixed.key == "model.lora.target_modules"
    assert "exclude_modules" in mixed.allowed
    assert "mlp.down_proj" in mixed.given


def test_adapters_alone_are_trained_and_add_nothing_at_first() -> None:
    plain = model_of()
    model = adapted(copy.deepcopy(plain), trained=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 14
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert torch.equal(logits_of(model), logits_of(plain))
    sizes = [3 * sum(layer.in_features + layer.out_features for layer in adapted_layers(model).values())]
    assert parameter_counts(model) == (sizes[0], sizes[0] + sum(p.numel() for p in plain.parameters()))
    with pytest.raises(ConfigError, match="merge the model's adapters first"):
        adapted(model)


def test_the_seed_alone_decides_what_adapters_begin_with() -> None:
    models = []
    for seed in (1, 1, 2):
        model, before = model_of(), torch.random.get_rng_state()
        add_adapters(model, LoraConfig(r=R), seed)
        assert torch.equal(torch.random.get_rng_state(), before)  # the run's own numbers are left alone
        models.append(torch.cat([parameter.flatten() for _, parameter in adapter_parameters(model)]))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_reference_is_the_model_without_them(kind: str) -> None:
    plain = model_of() if kind == "llama" else plain_model(kind)
    model = adapted(copy.deepcopy(plain), target_modules=WITH_HEAD) if kind == "llama" else stacked(kind)
    assert not torch.allclose(logits_of(model), logits_of(plain))
    before = logits_of(model)
    with without_adapters(model):
        assert torch.equal(logits_of(model), logits_of(plain))
    assert torch.equal(logits_of(model), before)
    assert all(parameter.requires_grad for _, parameter in adapter_parameters(model))
    # A copy computes with its own adapters.
    copied = copy.deepcopy(model)
    for _, parameter in adapter_parameters(copied):
        parameter.data.zero_()
    assert torch.equal(logits_of(copied), logits_of(plain))
    assert torch.equal(logits_of(model), before)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": WITH_HEAD}),
    ("llama", {"use_rslora": True}),
    ("qwen2", {"target_modules": ATTENTION}),  # its layers have biases
    ("gpt2", {}),  # its weights are [in, out]
    *((kind, {}) for kind in STACKED),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_the_stream_and_the_folder_are_the_same_policy(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The stream is a plain model, and the folder one that peft loads and merges to the same weights."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {}
    plain = plain_model(kind) if kind in STACKED else model_of(kind, **sizes)
    model = stacked(kind) if kind in STACKED else adapted(copy.deepcopy(plain), **settings)
    before, logits = {name: each.clone() for name, each in model.named_parameters()}, logits_of(model)
    streamed = dict(stream_weights(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name  # merging changes no weight that is trained
    assert [name for name, _ in stream_base(model)] == [name for name, _ in stream_weights(plain)]
    for named in (stream_base(model), base_parameters(model)):
        for name, weight in named:
            assert torch.equal(weight, plain.state_dict()[name]), name
    changed = {name for name, weight in plain.named_parameters() if not torch.equal(streamed[name], weight)}
    assert changed == {own_name(name, layer) for name, layer in adapted_layers(model).items()}

    write_adapter(model, dict(stream_adapters(model)), "the/base", tmp_path)
    own = copy.deepcopy(plain)
    loaded = peft.PeftModel.from_pretrained(own, str(tmp_path), autocast_adapter_dtype=False)
    assert loaded.peft_config["default"].base_model_name_or_path == "the/base"
    torch.testing.assert_close(logits_of(loaded), logits, rtol=0, atol=1e-9)
    merged = loaded.merge_and_unload()
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert streamed.keys() == dict(stream_weights(plain)).keys()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(streamed[name], weight, rtol=0, atol=1e-12, msg=name)

    merge_adapters(model)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]
    torch.testing.assert_close(logits_of(model), logits, rtol=0, atol=1e-9)


def own_name(name: str, layer: Any) -> str:
    """Return the name that an adapted weight has in the plain model."""
    return name.replace(".base_layer", "") + f".{getattr(layer, 'parameter_name', 'weight')}"


def changed_by_hand(weight: Tensor, down: Tensor, up: Tensor, is_transposed: bool) -> Tensor:
    """W + alpha / r B A, expert by expert: A has blocks of r rows, B has every E-th column."""
    if weight.dim() == 2:
        return weight + ALPHA / R * (up @ down)
    experts = len(weight)
    rows = []
    for expert in range(experts):
        change = up[:, expert::experts] @ down[expert * R : (expert + 1) * R]
        rows.append(weight[expert] + ALPHA / R * (change.T if is_transposed else change))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", STACKED)
def test_the_gradients_are_those_of_a_plain_model_with_the_sums_as_weights(kind: str) -> None:
    model, plain = stacked(kind), plain_model(kind).requires_grad_(False)
    logits = model(input_ids=IDS).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (logits * upstream).sum().backward()

    leaves, weights = {}, {}
    for name, layer in adapted_layers(model).items():
        down, up = (factor.detach().clone().requires_grad_() for factor in parameters_of(layer))
        leaves[name] = (down, up)
        own = own_name(name, layer)
        weights[own] = changed_by_hand(plain.get_parameter(own), down, up, kind == "gpt_oss")
    expected = torch.func.functional_call(plain, weights, kwargs={"input_ids": IDS}).logits
    (expected * upstream).sum().backward()

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert (logits - logits_of(plain)).abs().max() > 0.01
    for name, layer in adapted_layers(model).items():
        for factor, leaf in zip(parameters_of(layer), leaves[name], strict=True):
            assert factor.grad is not None
            assert leaf.grad is not None
            assert leaf.grad.abs().max() > 1e-6
            torch.testing.assert_close(factor.grad, leaf.grad, rtol=1e-9, atol=1e-9)
    assert all(parameter.grad is None for _, parameter in base_parameters(model))


@pytest.mark.parametrize("targets", [ATTENTION, WITH_HEAD, ["lm_head"]], ids=["body", "both", "head"])
@pytest.mark.parametrize("without", [False, True], ids=["with", "without"])
@pytest.mark.parametrize("packed", [False, True], ids=["shared", "packed"])
def test_log_probabilities_are_those_of_the_models_own_forward(
    targets: list[str], without: bool, packed: bool
) -> None:
    plain = adapted(model_of(), target_modules=targets)
    model = copy.deepcopy(plain)
    if packed:
        set_attention(model, VARLEN)
    ways = install_scoring_forward(model, TrainConfig())
    by_lengths = ForwardMode(chunked=True, packed=True, by_lengths=True)
    assert ways == (by_lengths if packed else ForwardMode(chunked=True, shared_width=32))
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
    restore_forward(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradient_checkpoints_change_no_gradient() -> None:
    gradients = []
    for checkpoints in (False, True):
        model = stacked("qwen3_moe", target_modules=[]).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().sum().backward()
        gradients.append([parameter.grad for _, parameter in adapter_parameters(model)])
        assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_the_scoring_forward_is_installed_on_a_model_with_adapted_experts() -> None:
    model = stacked("qwen3_moe").float()
    model.config._experts_implementation = "grouped_mm"
    assert install_scoring_forward(model, TrainConfig()).chunked
    assert all(layer.is_read for layer in parameter_adapters(model).values())


def test_in_half_precision_a_merged_stack_is_rounded_once() -> None:
    model = stacked("qwen3_moe").to(torch.bfloat16)
    name, layer = next((n, each) for n, each in parameter_adapters(model).items() if n.endswith("down_proj"))
    weight = model.get_submodule(name.rpartition(".")[0]).get_base_layer().down_proj
    down, up = (factor.double() for factor in parameters_of(layer))
    merged = dict(stream_weights(model))[name]
    assert merged.dtype == torch.bfloat16
    exact = changed_by_hand(weight.double(), down, up, is_transposed=False)
    halves = torch.finfo(torch.bfloat16).eps / 2
    assert ((merged.double() - exact).abs() <= exact.abs() * halves * 1.001 + 1e-7).all()


def test_a_parameter_that_its_module_does_not_read_is_refused() -> None:
    model = stacked("qwen3_moe")
    problem = problem_of(_check_parameters_read, model)
    assert problem.key == "model.lora.target_parameters"
    assert problem.given == "model.layers.0.mlp.experts.down_proj"
    with without_adapters(model):
        logits_of(model)
    assert not any(layer.is_read for layer in parameter_adapters(model).values())
    logits_of(model)
    _check_parameters_read(model)
