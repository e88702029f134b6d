"""The policy and its tokenizer from a Hugging Face folder or the hub, and plain copies of its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpox.config import ModelConfig
from grpox.errors import ConfigError, Problem
from grpox.model_source import model_location

TOLD = 3
"""Weights that a message names."""


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The model with its weights, on CPU, in the dtype of the config.

    Raises:
        ConfigError: transformers can load no model there; or the checkpoint lacks weights, or holds them in
            other shapes: transformers would draw those at random and only warn.
    """
    path = model_location(config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.dtype),
            output_loading_info=True,
            # Else they raise without a name; they are refused below.
            ignore_mismatched_sizes=True,
            **config.init,
        )
    except Exception as error:
        raise _unloadable("model", config, error) from error
    _check_weights(info, config.path)
    return model


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's configuration, without its weights.

    Raises:
        ConfigError: there is none that transformers can load.
    """
    path = model_location(config)
    try:
        return AutoConfig.from_pretrained(path, **config.init)
    except Exception as error:
        raise _unloadable("configuration", config, error) from error


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer; where it has no padding token, EOS pads (masks, not ids, tell padding apart).

    Raises:
        ConfigError: the folder holds no tokenizer that transformers can load.
    """
    shared = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
    init = {name: config.init[name] for name in shared if name in config.init}
    path = model_location(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **init)
    except Exception as error:
        raise _unloadable("tokenizer", config, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        what = "its tokenizer has neither a padding nor an EOS token"
        raise ConfigError(Problem(what, key="model.path", given=config.path))
    return tokenizer


def architecture_of(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """A builder of plain, unpartitioned models like `model`, with random weights."""
    config, dtype = model.config, model.dtype
    # Code that came with the checkpoint was trusted when `model` was loaded.
    remote = {"trust_remote_code": True} if type(model).__module__.startswith("transformers_modules") else {}

    def build() -> PreTrainedModel:
        # Initialisation cannot be left out: it also fills the buffers and ties the embeddings.
        with torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **remote)

    return build


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's EOS, and those of the checkpoint's generation config."""
    generation_config: GenerationConfig | None = getattr(model, "generation_config", None)
    ids: Any = generation_config.eos_token_id if generation_config else None
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *listed) if i is not None))


def _check_weights(info: dict[str, Any], path: str) -> None:
    """Refuse a checkpoint that does not fill the model; tied weights that are stored once are no gap."""
    problems = []
    if missing := sorted(info["missing_keys"]):
        problems.append(f"weights missing in the checkpoint, {len(missing)} in all: {_some(missing)}")
    if mismatched := sorted(info["mismatched_keys"]):
        shapes = [f"{name} is {list(there)}, not {list(here)}" for name, there, here in mismatched]
        problems.append(f"weights of another shape, {len(shapes)} in all: {_some(shapes)}")
    if problems:
        raise ConfigError([Problem(what, key="model.path", given=path) for what in problems])


def _some(names: list[str]) -> str:
    return ", ".join(names[:TOLD]) + (", ..." if len(names) > TOLD else "")


def _unloadable(what: str, config: ModelConfig, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()) or "no reason given"
    told = f"its {what} cannot be loaded: {type(error).__name__}: {reason}"
    attention = config.init.get("attn_implementation")
    if attention is not None and "ttention" in told:
        return ConfigError(Problem(told, key="model.init.attn_implementation", given=str(attention)))
    if isinstance(error, TypeError) and config.init:
        return ConfigError(Problem(told, key="model.init", given=", ".join(config.init)))
    return ConfigError(Problem(told, key="model.path", given=config.path))
