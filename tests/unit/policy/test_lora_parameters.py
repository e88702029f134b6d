"""Adapters of parameters, such as stacked experts: against peft's own and plain loops over the experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import test_lora_layers
import torch
from support.architectures import tiny_model
from test_lora_layers import IDS, logits_of
from torch import Tensor
from transformers import PreTrainedModel

from grpox.config import LoraConfig, TrainConfig
from grpox.errors import ConfigError, Problem
from grpox.policy.adapter_folder import write_adapter
from grpox.policy.engine import _check_parameters_read
from grpox.policy.lora.add import add_adapters, parameter_targets
from grpox.policy.lora.layers import (
    adapted_layers,
    adapter_parameters,
    base_parameters,
    describe_training,
    merge_adapters,
    parameter_adapters,
    parameters_of,
    without_adapters,
)
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.policy.weight_stream import stream_adapters, stream_base, stream_weights

peft = pytest.importorskip("peft")

R, ALPHA = 3, 5
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: dict[str, list[str]] = {
    "qwen3_moe": [*EXPERTS, "gate.weight"],  # the router's weight is a matrix
    "mixtral": EXPERTS,
    "gpt_oss": [*EXPERTS, "experts.down_proj_bias"],  # its stacks are [E, in, out]
    "deepseek_v3": EXPERTS,  # its first layer has no experts
}


def plain_model(kind: str) -> PreTrainedModel:
    model = tiny_model(kind).double()
    model.config._experts_implementation = "eager"  # torch's grouped products take no float64
    return model


def adapted(kind: str, **settings: Any) -> PreTrainedModel:
    """A model with adapters as after some steps, of a linear layer too."""
    targets = {"target_modules": ["o_proj"], "target_parameters": KINDS[kind]}
    return test_lora_layers.adapted(plain_model(kind), **targets | settings)


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_a_plain_model_with_the_sums_as_weights(kind: str) -> None:
    model, plain = adapted(kind), plain_model(kind).requires_grad_(False)
    logits = model(input_ids=IDS).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (logits * upstream).sum().backward()

    leaves, weights = {}, {}
    for name, layer in adapted_layers(model).items():
        down, up = (factor.detach().clone().requires_grad_() for factor in parameters_of(layer))
        leaves[name] = (down, up)
        own = name.replace(".base_layer", "") + f".{getattr(layer, 'parameter_name', 'weight')}"
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


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_weights_are_those_of_peft_under_the_names_of_the_plain_model(
    kind: str, tmp_path: Path
) -> None:
    plain, model = plain_model(kind), adapted(kind)
    streamed = dict(stream_weights(model))
    assert [name for name, _ in stream_base(model)] == [name for name, _ in stream_weights(plain)]
    for name, weight in stream_base(model):
        assert torch.equal(weight, plain.state_dict()[name]), name

    write_adapter(model, dict(stream_adapters(model)), "the/base", tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain_model(kind), str(tmp_path), autocast_adapter_dtype=False)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-9)
    merged = loaded.merge_and_unload()
    assert merged.state_dict().keys() == plain.state_dict().keys()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(streamed[name], weight, rtol=0, atol=1e-12, msg=name)
    changed = {name for name, weight in plain.named_parameters() if not torch.equal(streamed[name], weight)}
    assert {name for name in changed if "_proj.weight" not in name} == parameter_adapters(model).keys()

    before = logits_of(model)
    merge_adapters(model)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-9)


def test_without_adapters_the_model_is_the_plain_one() -> None:
    plain, model = plain_model("qwen3_moe"), adapted("qwen3_moe")
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


def test_gradient_checkpoints_change_no_gradient() -> None:
    gradients = []
    for checkpoints in (False, True):
        model = adapted("qwen3_moe", target_modules=[]).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().sum().backward()
        gradients.append([parameter.grad for _, parameter in adapter_parameters(model)])
        assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_the_scoring_forward_is_installed_on_a_model_with_adapted_experts() -> None:
    model = adapted("qwen3_moe").float()
    model.config._experts_implementation = "grouped_mm"
    assert install_scoring_forward(model, TrainConfig()).chunked
    assert all(layer.is_read for layer in parameter_adapters(model).values())


def test_in_half_precision_a_merged_stack_is_rounded_once() -> None:
    model = adapted("qwen3_moe").to(torch.bfloat16)
    name, layer = next((n, each) for n, each in parameter_adapters(model).items() if n.endswith("down_proj"))
    weight = model.get_submodule(name.rpartition(".")[0]).get_base_layer().down_proj
    down, up = (factor.double() for factor in parameters_of(layer))
    merged = dict(stream_weights(model))[name]
    assert merged.dtype == torch.bfloat16
    exact = changed_by_hand(weight.double(), down, up, is_transposed=False)
    halves = torch.finfo(torch.bfloat16).eps / 2
    assert ((merged.double() - exact).abs() <= exact.abs() * halves * 1.001 + 1e-7).all()


def test_a_parameter_that_its_module_does_not_read_is_refused() -> None:
    model = adapted("qwen3_moe")
    with pytest.raises(ConfigError) as caught:
        _check_parameters_read(model)
    [problem] = caught.value.problems
    assert (problem.key, problem.given) == (
        "model.lora.target_parameters",
        "model.layers.0.mlp.experts.down_proj",
    )
    with without_adapters(model):
        logits_of(model)
    assert not any(layer.is_read for layer in parameter_adapters(model).values())
    logits_of(model)
    _check_parameters_read(model)


# -- Names -----------------------------------------------------------------------------------------------


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
        (adapted("qwen3_moe"), ["experts.down_proj", "experts.gate_up_proj", "gate.weight"]),
    ):
        write_adapter(each, dict(stream_adapters(each)), "base", tmp_path)
        assert peft.PeftConfig.from_pretrained(tmp_path).target_parameters == written


def refused(kind: str, target: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        add_adapters(tiny_model(kind), LoraConfig(target_parameters=[target]), seed=0)
    [problem] = caught.value.problems
    assert (problem.key, problem.given) == ("model.lora.target_parameters", target)
    return problem


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
    assert what in refused("qwen3_moe", target).what


def test_a_slip_is_refused_with_the_nearest_name() -> None:
    slip = refused("qwen3_moe", "mlp.experts.gate_up_prj")
    assert slip.nearest == "experts.gate_up_proj"
    assert slip.allowed == "experts.gate_up_proj, experts.down_proj, gate.weight"
    assert "no such key" in refused("llama", "experts.down_proj").allowed


def test_layers_that_peft_takes_for_experts_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        add_adapters(tiny_model("deepseek_v3"), LoraConfig(target_parameters=EXPERTS), seed=0)
    [problem] = caught.value.problems
    assert problem.key == "model.lora.target_modules"
    assert "exclude_modules" in problem.allowed
    assert "mlp.down_proj" in problem.given
