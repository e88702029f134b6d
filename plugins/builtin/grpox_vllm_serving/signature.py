"""What of a model's architecture must be alike in a run and in the server that samples for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Keys of a transformers configuration. The weights themselves are sent, so that a checkpoint may differ."""


def signature(config: Any) -> dict[str, Any]:
    """The values of `SHAPE` that a transformers configuration has."""
    values = config.get_text_config().to_dict()
    return {name: values[name] for name in SHAPE if values.get(name) is not None}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """One line for each value that both have and that differs."""
    return [
        f"{name} is {theirs[name]} there and {ours[name]} here"
        for name in SHAPE
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
