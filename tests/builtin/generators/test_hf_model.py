"""Faster parts of the model that hf samples from: attention with shared heads of keys, and packed layers."""

from types import SimpleNamespace

import pytest
import torch
from support.small_models import model_of
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpox.policy.models import architecture_of
from grpox_generators import packed_linear
from grpox_generators.hf import GROUPED, group_heads, grouped_attention
from grpox_generators.packed_linear import PackedLinear, has_operators, pack

IDS = torch.tensor([[3, 1, 4, 1, 5, 2]])
LAYER = SimpleNamespace(num_key_value_groups=3, is_causal=True)
"""Attributes of an attention layer that the function uses: H / K."""

packs = pytest.mark.skipif(not has_operators(), reason="torch lacks oneDNN's operators")


@pytest.fixture(autouse=True)
def small_layers_pay(monkeypatch):
    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(packed_linear, "LARGEST_FROM", 1)


def model(tied=False):
    return model_of("llama", torch.float32, tie_word_embeddings=tied).requires_grad_(False)


def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("queries", [1, 5], ids=["one", "all"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_is_transformers_sdpa(queries, padded, scaling):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, queries, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 4)
    mask = None
    if padded:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()[-queries:].repeat(2, 1, 1, 1)
        mask[0, :, :, :2] = False
        mask[:, :, :, 0] = True
    expected, _ = sdpa_attention_forward(LAYER, query, key, value, mask, scaling=scaling)
    found, _ = grouped_attention(LAYER, query, key, value, mask, scaling=scaling)
    assert found.shape == (2, queries, 6, 4)
    torch.testing.assert_close(found, expected)


def test_it_takes_the_place_of_sdpa_alone():
    policy = model()
    copied = architecture_of(policy)()
    group_heads(copied)
    assert copied.model.layers[0].self_attn.config._attn_implementation == GROUPED
    assert policy.config._attn_implementation == "sdpa"
    eager = model()
    eager.set_attn_implementation("eager")
    group_heads(eager)
    assert eager.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kind", "is_replaced"), [("llama", True), ("gemma2", False)], ids=["plain", "capped scores"]
)
def test_it_takes_the_place_of_a_flash_kernel_that_computes_the_same(kind, is_replaced):
    flash = model_of(kind)
    flash.config._attn_implementation_internal = "flash_attention_2"
    group_heads(flash)
    assert flash.config._attn_implementation == (GROUPED if is_replaced else "flash_attention_2")


@packs
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(rows, bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(65, 33, bias=bias).requires_grad_(False)
    inputs = torch.randn(2, rows, 65)
    expected = layer(inputs)
    assert pack(layer) == [layer]
    torch.testing.assert_close(layer(inputs), expected)


@packs
def test_layers_with_one_input_share_a_product():
    one = model()
    layers = pack(one)
    attention, mlp = one.model.layers[0].self_attn, one.model.layers[0].mlp
    assert attention.q_proj.product is attention.k_proj.product is attention.v_proj.product
    assert mlp.gate_proj.product is mlp.up_proj.product is not mlp.down_proj.product
    assert len({id(layer.product) for layer in layers}) == 2 * 4 + 1


@packs
@pytest.mark.parametrize("order", ["ab", "ba", "aab", "abab"])
def test_a_shared_product_is_that_of_each_input(order):
    """Also if a layer is called twice, another not at all, and an input has changed in place."""
    holder, plain = torch.nn.Module(), torch.nn.Module()
    for module in (holder, plain):
        torch.manual_seed(0)
        module.gate_proj, module.up_proj = torch.nn.Linear(8, 4), torch.nn.Linear(8, 6)
    pack(holder.requires_grad_(False))
    names = {"a": "gate_proj", "b": "up_proj"}
    inputs = torch.randn(3, 8)
    for _ in range(2):
        for layer in order:
            expected = getattr(plain, names[layer])(inputs)
            torch.testing.assert_close(getattr(holder, names[layer])(inputs), expected)
        holder.gate_proj(inputs)
        inputs.add_(1)
        torch.testing.assert_close(holder.up_proj(inputs), plain.up_proj(inputs))


@packs
def test_new_weights_count_once_the_blocks_are_released():
    plain, packing = model(tied=True), model(tied=True)
    layers = pack(packing)
    assert len(layers) == 2 * 7 + 1
    torch.testing.assert_close(logits(packing), logits(plain))
    for one, other in zip(plain.parameters(), packing.parameters(), strict=True):
        one.add_(0.1)
        other.copy_(one)
    assert not torch.allclose(logits(packing), logits(plain))
    for layer in layers:
        layer.product.release()
    torch.testing.assert_close(logits(packing), logits(plain))


@packs
@pytest.mark.parametrize("lacks", ["precision", "operators", "size"])
def test_what_cannot_be_packed_stays(lacks, monkeypatch):
    one = model()
    if lacks == "precision":
        one = one.bfloat16()
    elif lacks == "operators":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(packed_linear, "LARGEST_FROM", 2**18)
    assert pack(one) == []
    assert not any(isinstance(module, PackedLinear) for module in one.modules())
