"""Attention of one token with shared heads of keys: transformers' sdpa, in the model that it is given to."""

import pytest
import torch
from support.small_models import model_of
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpox.policy.models import architecture_of
from grpox_generators.hf import GROUPED, group_heads, grouped_attention


class Layer(torch.nn.Module):
    """Attributes of an attention layer that the function uses: H / K."""

    num_key_value_groups = 3
    is_causal = True


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
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=scaling)
    found, _ = grouped_attention(Layer(), query, key, value, mask, scaling=scaling)
    assert found.shape == (2, queries, 6, 4)
    torch.testing.assert_close(found, expected)


def small(**attention):
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM._from_config(config, **attention)


def test_it_takes_the_place_of_sdpa_alone():
    policy = small()
    copied = architecture_of(policy)()
    group_heads(copied)
    assert copied.model.layers[0].self_attn.config._attn_implementation == GROUPED
    assert policy.config._attn_implementation == "sdpa"
    eager = small(attn_implementation="eager")
    group_heads(eager)
    assert eager.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kind", "is_replaced"), [("llama", True), ("gemma2", False)], ids=["plain", "capped scores"]
)
def test_it_takes_the_place_of_a_flash_kernel_that_computes_the_same(kind, is_replaced):
    model = model_of(kind)
    model.config._attn_implementation_internal = "flash_attention_2"
    group_heads(model)
    assert model.config._attn_implementation == (GROUPED if is_replaced else "flash_attention_2")
