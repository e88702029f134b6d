"""Attention of one new token, for models whose query heads share heads of keys and values.

torch is faster by far on the cache as it is than on the copy that transformers' sdpa makes of it where rows are
padded, in which each head of keys is repeated for every query head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grpox_grouped_sdpa"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa, with its arguments.

    For a single query [B, H, 1, D], the H / K heads that share one of the K heads of keys [B, K, L, D] are
    computed as if they were positions of one head: all of them see the same keys.
    """
    heads = key.shape[1]
    shared = query.shape[2] == 1 and query.shape[1] > heads and others.get("position_bias") is None
    if not shared or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    rows, _, _, width = query.shape
    found = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads, -1, width), key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(rows, 1, -1, value.shape[-1]), None


def group_heads(model: Any) -> None:
    """Let a model that only generates use it in place of transformers' sdpa."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)
