"""The policy and its tokenizer from a Hugging Face folder, and plain copies of its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpox.config import ModelConfig
from grpox.errors import ConfigError, Problem


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The model with its weights, on CPU, in the dtype of the config.

    Raises:
        ConfigError: the folder holds no model that transformers can load.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(config.path, dtype=getattr(torch, config.dtype))
    except Exception as error:
        raise _unloadable("model", config.path, error) from error


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer; where it has no padding token, EOS pads (masks, not ids, tell padding apart).

    Raises:
        ConfigError: the folder holds no tokenizer that transformers can load.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path)
    except Exception as error:
        raise _unloadable("tokenizer", config.path, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        what = "its tokenizer has neither a padding nor an EOS token"
        raise ConfigError(Problem(what, key="model.path", given=config.path))
    return tokenizer


def architecture_of(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """A builder of plain, unpartitioned models like `model`, with random weights."""
    config, dtype = model.config, model.dtype

    def build() -> PreTrainedModel:
        # Initialisation cannot be left out: it also fills the buffers and ties the embeddings.
        with torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return build


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's EOS, and those of the checkpoint's generation config."""
    generation_config: GenerationConfig | None = getattr(model, "generation_config", None)
    ids: Any = generation_config.eos_token_id if generation_config else None
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *listed) if i is not None))


def _unloadable(what: str, path: str, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()
    told = f"its {what} cannot be loaded: {type(error).__name__}: {reason[0] if reason else 'no reason given'}"
    return ConfigError(Problem(told, key="model.path", given=path))
