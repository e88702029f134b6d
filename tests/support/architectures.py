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
LATENT_ATTENTION = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32)
LATENT_ATTENTION |= {"q_lora_rank": 32, "kv_lora_rank": 32}
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
        "tie_word_embeddings": True, "sliding_window": 8, "global_head_dim": 32,
        "num_global_key_value_heads": 2, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
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
FURTHER = """
afmoe arcee bamba bart bert big_bird biogpt bitnet blenderbot cohere cohere2 cohere2_moe cwm doge electra
ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma glm glm4 gpt_bigcode gpt_neox_japanese gptj granite
granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba jetmoe
laguna lfm2 llama4_text mamba marian mbart mellum minimax minimax_m2 ministral mistral modernbert-decoder
moshi mpt mvp nanochat nemotron olmo olmo2 olmo3 openai-gpt opt pegasus persimmon phi phimoe plbart qwen3
recurrent_gemma roberta roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma
whisper xglm xlm
""".split()  # noqa: SIM905
"""Further kinds of model."""
SIZES = {
    **dict.fromkeys(("n_embd", "d_model", "n_inner", "ffn_dim", "word_embed_proj_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "mamba_n_heads"), 4),
    **dict.fromkeys(("n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("moe_intermediate_size", "mamba_d_head"), 32),
    "encoder_ffn_dim": 64,
    "rotary_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
"""Sizes under the other names that kinds have for them."""
WITH_BUFFERS = ("gemma4_text", "deepseek_v3", "glm4_moe")


def tiny_model(kind: str, seed: int = 0, **own: Any) -> PreTrainedModel:
    """Build a random model, its weights large enough that each of them matters."""
    config = CONFIG_MAPPING[kind](**COMMON | OWN.get(kind, {}) | own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        perturb(model, seed)
    return model.eval()


def further_model(kind: str, **settings: Any) -> PreTrainedModel:
    """Build a random model of any kind, `FURTHER` ones and those of `OWN`.

    Args:
        settings: values of those of its fields that the kind has.
    """
    names = vars(CONFIG_MAPPING[kind]())
    own = {name: value for name, value in {**SIZES, **settings}.items() if name in names}
    config = CONFIG_MAPPING[kind](**{**own, **COMMON, **OWN.get(kind, {})})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int) -> None:
    """Change every parameter and every persistent buffer, each by itself."""
    draw = torch.Generator().manual_seed(seed)
    for weight in (*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))):
        if weight.is_floating_point():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
