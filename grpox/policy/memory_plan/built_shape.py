"""The shape of a model of any kind: transformers builds it on the meta device, where tensors have no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpox.config import ModelConfig
from grpox.errors import ConfigError, Problem, describe
from grpox.policy.memory_plan.shape import Linear, ModelShape
from grpox.policy.models import load_config


def built_shape(config: ModelConfig) -> ModelShape:
    """No weights are read.

    Raises:
        ConfigError: transformers cannot load the configuration, or builds no model of it; or the widths that
            activations depend on are missing.
    """
    loaded = load_config(config)
    try:
        with torch.device("meta"):
            trusted = bool(config.init.get("trust_remote_code", False))
            model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=trusted)
    except Exception as error:
        what = f"no model can be built of its configuration: {describe(error)}"
        raise ConfigError(Problem(what, "model.path", given=config.path)) from error
    text = loaded.get_text_config()
    hidden, heads = _size(text, config, "hidden_size"), _size(text, config, "num_attention_heads")
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    return ModelShape(
        weights=tuple(weight.numel() for weight in model.parameters()),
        linears=tuple(_linears(model)),
        hidden=hidden,
        # Families without gated layers call it otherwise or leave it out: four times the width is their custom.
        intermediate=getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden,
        layers=_size(text, config, "num_hidden_layers"),
        queries=heads * head_dim,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=_size(text, config, "vocab_size"),
    )


def _size(text: Any, config: ModelConfig, name: str) -> int:
    size = getattr(text, name, None)
    if isinstance(size, int):
        return size
    what = f"its config.json tells no {name}, without which its activations cannot be told"
    raise ConfigError(Problem(what, "model.path", given=str(Path(config.path))))


def _linears(model: Any) -> list[Linear]:
    head = model.get_output_embeddings()
    return [
        Linear(name.rpartition(".")[2], module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
