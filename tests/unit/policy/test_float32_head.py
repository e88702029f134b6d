"""`model.cast_lm_head_to_fp32`: logits of a bfloat16 model against float32 products of its head's input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.problems import problem_of
from support.sampling_parity import MODEL
from support.small_models import batch, model_of
from torch import Tensor, nn

from grpox.config import LoraConfig, ModelConfig, TrainConfig
from grpox.policy import float32_head
from grpox.policy.batch import FULL_LOGITS
from grpox.policy.float32_head import Float32Head, cast_head, has_float32_head, restore_head
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.lora.add import add_adapters
from grpox.policy.models import architecture_of, load_model
from grpox.policy.scoring_forward import install_scoring_forward

TEMPERATURE = 0.7


def half_model(casts: bool, **settings: Any) -> Any:
    model = model_of("llama", torch.bfloat16, **settings)
    if casts:
        cast_head(model)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("casts", "chunked"), [(True, True), (True, False), (False, True), (False, False)])
def test_log_probabilities_of_a_bfloat16_model_are_those_of_float32_products(
    casts: bool, chunked: bool, tied: bool
) -> None:
    """Without the cast and in one piece all logits are rounded to bfloat16."""
    model = half_model(casts, tie_word_embeddings=tied)
    mode = install_scoring_forward(model, TrainConfig(chunked_logprobs=chunked, packing=False))
    assert (mode != FULL_LOGITS) == chunked
    seen: list[tuple[Tensor, Any]] = []
    head, samples = model.get_output_embeddings(), batch(mode)
    head.register_forward_pre_hook(
        lambda module, inputs, options: seen.append((inputs[0], options.get("wanted"))), with_kwargs=True
    )
    found = completion_logprobs(model, samples, TEMPERATURE)[0][samples.token_mask]
    [(hidden, wanted)] = seen
    assert hidden.dtype == torch.bfloat16
    log_p = torch.log_softmax(hidden.float() @ head.weight.float().T / TEMPERATURE, dim=-1)
    if wanted is not None:
        rows = samples.as_rows(log_p.gather(-1, wanted.targets.unsqueeze(-1)).squeeze(-1))
    else:
        width = samples.token_mask.shape[1]
        targets = samples.input_ids[:, -width:].unsqueeze(-1)
        rows = log_p[:, -width - 1 : -1].gather(-1, targets).squeeze(-1)
    expected = rows[samples.token_mask]
    if casts or chunked:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    else:
        assert float((found - expected).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_rounded_once(bias: bool) -> None:
    """Against float64 with the same rounded numbers."""
    torch.manual_seed(3)
    head: Any = nn.Linear(6, 17, bias=bias, dtype=torch.bfloat16)
    exact = copy.deepcopy(head).double()
    head.__class__ = Float32Head
    hidden = torch.randn(2, 5, 6).bfloat16().requires_grad_()
    precise, upstream = hidden.detach().double().requires_grad_(), torch.randn(2, 5, 17)
    logits, expected = head(hidden), exact(precise)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-6)
    ours = torch.autograd.grad(logits, [hidden, *head.parameters()], upstream)
    theirs = torch.autograd.grad(expected, [precise, *exact.parameters()], upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - other).norm() / other.norm()) < 2**-8


def test_cudas_products_have_float32_results_and_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device every read fails; CUDA's products, with `out_dtype`, have a form there too."""
    monkeypatch.setattr(float32_head, "as_factor", lambda tensor: tensor)
    head = Float32Head(6, 17, dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(2, 5, 6, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logits = head(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (2, 5, 17))
    gradients = torch.autograd.grad(logits.sum(), [hidden, *head.parameters()])
    assert [each.dtype for each in gradients] == [torch.bfloat16] * 3


def test_a_float32_head_is_the_layer_itself() -> None:
    model = model_of("llama", torch.float32)
    hidden = torch.randn(3, 32)
    before = model.get_output_embeddings()(hidden)
    cast_head(model)
    assert torch.equal(model.get_output_embeddings()(hidden), before)


def test_the_models_that_sample_and_refer_have_it_too() -> None:
    config = ModelConfig(path=str(MODEL), dtype="bfloat16", cast_lm_head_to_fp32=True)
    model = load_model(config)
    copies = (model, copy.deepcopy(model), architecture_of(model)())
    tokens = torch.tensor([[3, 4, 5]])
    assert [each(input_ids=tokens).logits.dtype for each in copies] == [torch.float32] * 3
    assert not has_float32_head(architecture_of(load_model(ModelConfig(path=str(MODEL), dtype="bfloat16")))())
    restore_head(model)
    assert model(input_ids=tokens).logits.dtype == torch.bfloat16


def test_a_head_with_an_adapter_or_of_another_kind_is_refused() -> None:
    adapted, other = half_model(casts=False), half_model(casts=False)
    add_adapters(adapted, LoraConfig(target_modules=["lm_head"]), seed=0)
    other.lm_head = nn.Sequential(other.lm_head)
    for model in (adapted, other):
        problem = problem_of(cast_head, model)
        assert (problem.key, problem.given) == ("model.cast_lm_head_to_fp32", "true")
