"""Tiny random models of many kinds: with buffers that a checkpoint holds, tied and fused weights, experts.

Their heads are of 32, which vLLM's CPU build asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpox.policy.weight_stream import persistent_buffers

VOCABULARY = 17
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT_ATTENTION = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
SOME_EXPERTS = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "phi3": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "tie_word_embeddings": True},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 2, "tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 32},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 8},
    "gemma4_text": {
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "apertus": {},
    "hrm_text": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_method": "noaux_tc",
        **SOME_EXPERTS, **LATENT_ATTENTION,
    },
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, **SOME_EXPERTS},
}  # fmt: skip
"""Kind of model -> what is its own of its configuration."""
WITH_BUFFERS = ("gemma4_text", "deepseek_v3", "glm4_moe")


def tiny_model(kind: str, seed: int = 0, **own: Any) -> PreTrainedModel:
    """Build a random model, its weights large enough that each of them matters."""
    config = CONFIG_MAPPING[kind](**COMMON | OWN.get(kind, {}) | own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        perturb(model, seed)
    return model.eval()


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int) -> None:
    """Change every parameter and every persistent buffer, each by itself."""
    draw = torch.Generator().manual_seed(seed)
    for weight in (*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))):
        if weight.is_floating_point():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
